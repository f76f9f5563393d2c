//! The steps for whose tensors a peer waits. Serving each of them takes memory, so their number is bounded.

use super::limits::MAX_OPEN_STEPS;

/// Usually few, and most requests are for the same step as the one before.
#[derive(Default)]
pub struct OpenSteps {
    /// Step and number of its requests.
    steps: Vec<(i64, u32)>,
    last: usize,
}

impl OpenSteps {
    /// A request came. False: there are too many steps.
    pub fn enter(&mut self, step: i64) -> bool {
        if let Some(at) = self.find(step) {
            self.steps[at].1 += 1;
            return true;
        }
        if self.steps.len() >= MAX_OPEN_STEPS {
            return false;
        }
        self.last = self.steps.len();
        self.steps.push((step, 1));
        true
    }

    /// A request that entered was answered.
    pub fn leave(&mut self, step: i64) {
        let Some(at) = self.find(step) else { return };
        self.steps[at].1 -= 1;
        if self.steps[at].1 == 0 {
            self.steps.swap_remove(at);
        }
    }

    pub fn clear(&mut self) {
        *self = OpenSteps::default();
    }

    fn find(&mut self, step: i64) -> Option<usize> {
        if self.steps.get(self.last).is_some_and(|(known, _)| *known == step) {
            return Some(self.last);
        }
        let at = self.steps.iter().position(|(known, _)| *known == step)?;
        self.last = at;
        Some(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_counted_and_bounded() {
        let mut open = OpenSteps::default();
        let most = MAX_OPEN_STEPS as i64;
        for round in 0..3 {
            for step in 0..most {
                assert!(open.enter(step) && open.enter(step), "{round}");
            }
            assert!(!open.enter(most) && open.enter(0));
            open.leave(0);
            for step in 0..most {
                open.leave(step);
                assert!(!open.enter(most));
            }
            open.leave(most);
            for step in (0..most).rev() {
                open.leave(step);
            }
            assert!(open.steps.is_empty());
        }
    }

    #[test]
    fn all_steps_can_be_forgotten() {
        let mut open = OpenSteps::default();
        (0..MAX_OPEN_STEPS as i64).for_each(|step| assert!(open.enter(step)));
        open.clear();
        assert!(open.steps.is_empty() && open.enter(-1));
    }
}
