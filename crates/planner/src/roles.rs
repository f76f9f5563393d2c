//! Which tasks are parameter servers.

use super::graph::index;
use super::placement::Roles;

pub struct Task<'a> {
    /// For example "/job:ps/replica:0/task:0".
    pub name: &'a str,
    /// The graph has a variable there.
    pub holds_variables: bool,
}

/// Jobs with these names are parameter servers by default.
const USUAL: [&str; 2] = ["ps", "parameter_server"];

/// Whether a job with this name is a parameter server by default.
pub fn is_usual(job: &str) -> bool {
    USUAL.contains(&job)
}

/// `tasks` are all tasks of the cluster. `named` jobs are servers; by default the jobs with a usual name; if there is
/// none, the jobs that hold variables except the caller's. `own` is the task that makes the calls, and is never a
/// server.
pub fn roles(tasks: &[Task], own: u32, named: Option<&[String]>) -> Roles {
    let own_job = tasks.get(index(own)).map_or("", |task| job(task.name));
    let usual = tasks.iter().any(|task| is_usual(job(task.name)));
    let is_server = |(number, task): (usize, &Task)| {
        let name = job(task.name);
        let meant = match named {
            Some(named) => named.iter().any(|server| server == name),
            None if usual => is_usual(name),
            None => name != own_job && tasks.iter().any(|other| other.holds_variables && job(other.name) == name),
        };
        meant && number != index(own)
    };
    Roles { servers: tasks.iter().enumerate().map(is_server).collect() }
}

fn job(task: &str) -> &str {
    task.split('/').find_map(|part| part.strip_prefix("job:")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn servers(tasks: &[(&str, bool)], own: u32, named: Option<&str>) -> Vec<bool> {
        let tasks: Vec<Task> =
            tasks.iter().map(|(name, holds_variables)| Task { name, holds_variables: *holds_variables }).collect();
        let named: Option<Vec<String>> = named.map(|named| named.split(',').map(str::to_owned).collect());
        roles(&tasks, own, named.as_deref()).servers
    }

    const PS: (&str, bool) = ("/job:ps/replica:0/task:0", false);
    const WORKER: (&str, bool) = ("/job:worker/replica:0/task:0", true);
    const OTHER: (&str, bool) = ("/job:other/replica:0/task:0", true);

    #[test]
    fn jobs_with_a_usual_name_are_servers_and_no_others() {
        assert_eq!(servers(&[WORKER, PS, OTHER], 0, None), [false, true, false]);
        let parameter_server = ("/job:parameter_server/replica:0/task:3", false);
        assert_eq!(servers(&[parameter_server, WORKER], 1, None), [true, false]);
    }

    #[test]
    fn otherwise_jobs_with_variables_are_servers() {
        let empty = ("/job:other/replica:0/task:1", false);
        let idle = ("/job:idle/replica:0/task:0", false);
        let colleague = ("/job:worker/replica:0/task:1", true);
        assert_eq!(servers(&[WORKER, OTHER, empty, idle, colleague], 0, None), [false, true, true, false, false]);
    }

    #[test]
    fn named_jobs_take_precedence() {
        assert_eq!(servers(&[WORKER, PS, OTHER], 0, Some("other,none")), [false, false, true]);
    }

    #[test]
    fn no_task_calls_itself() {
        let second = ("/job:ps/replica:0/task:1", false);
        assert_eq!(servers(&[PS, second, WORKER], 0, None), [false, true, false]);
        assert_eq!(servers(&[], 0, None), []);
    }
}
