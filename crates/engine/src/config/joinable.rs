//! The tasks that may join a job without being in its ClusterSpec.

use std::fmt;

use super::kinds::{digits, is_job};

/// The most tasks that may join: what they cost is bounded.
const MOST: usize = 65_536;

/// Numbers of tasks by job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joinable(Vec<(String, usize)>);

impl Joinable {
    /// The error is what the text must be.
    pub fn parse(text: &str) -> Result<Self, String> {
        let one = |part: &str| {
            let (job, count) = part.trim().split_once(':')?;
            let count = digits(count).and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0)?;
            is_job(job).then(|| (job.to_owned(), count))
        };
        let jobs = text.split(',').map(one).collect::<Option<Vec<_>>>().map(Self);
        let fits = |all: &Self| {
            let is_once = |(job, _): &(String, usize)| all.0.iter().filter(|(other, _)| other == job).count() == 1;
            let sum = all.0.iter().try_fold(0, |sum: usize, (_, count)| sum.checked_add(*count));
            all.0.iter().all(is_once) && sum.is_some_and(|sum| sum <= MOST)
        };
        jobs.filter(fits).ok_or_else(|| {
            format!("jobs, each once, with the number of their tasks, at most {MOST} in all: worker:8,evaluator:1")
        })
    }

    pub fn count(&self) -> usize {
        self.0.iter().map(|(_, count)| count).sum()
    }

    /// Whether this is a task's name, in TensorFlow's spelling, and on the list.
    pub fn includes(&self, task: &str) -> bool {
        let parts = task.strip_prefix("/job:").and_then(|rest| rest.split_once("/replica:0/task:"));
        let Some((job, number)) = parts else { return false };
        let number = digits(number).filter(|n| n.to_string() == number).and_then(|n| usize::try_from(n).ok());
        number.is_some_and(|number| self.0.iter().any(|(known, count)| known == job && number < *count))
    }
}

impl fmt::Display for Joinable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let each: Vec<String> = self.0.iter().map(|(job, count)| format!("{job}:{count}")).collect();
        f.write_str(&each.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_jobs_and_numbers() {
        let list = Joinable::parse("worker:8, evaluator:1").unwrap();
        assert_eq!((list.count(), list.to_string().as_str()), (9, "worker:8,evaluator:1"));
        for bad in ["", "worker", "worker:", "worker:0", "worker:-1", "worker:+1", "worker:8,", "8:worker", "a b:1"] {
            assert!(Joinable::parse(bad).is_err(), "{bad}");
        }
        assert!(Joinable::parse("worker:65536").is_ok());
        for bad in ["worker:65537", "a:65536,b:1", "a:1,b:18446744073709551615", "a:1,b:1,a:2"] {
            assert!(Joinable::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn only_names_on_the_list_are_included() {
        let list = Joinable::parse("worker:8").unwrap();
        for number in 0..8 {
            assert!(list.includes(&format!("/job:worker/replica:0/task:{number}")));
        }
        for name in [
            "/job:worker/replica:0/task:8",
            "/job:worker/replica:0/task:07",
            "/job:worker/replica:0/task:+7",
            "/job:worker/replica:0/task:",
            "/job:worker/replica:0/task:18446744073709551616",
            "/job:worker/replica:1/task:0",
            "/job:worker/replica:0/task:0/device:CPU:0",
            "/job:workers/replica:0/task:0",
            "/job:ps/replica:0/task:0",
            "/job:/replica:0/task:0",
            "worker:0",
            "",
        ] {
            assert!(!list.includes(name), "{name}");
        }
    }
}
