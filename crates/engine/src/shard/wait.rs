//! How a reactor waits for completions: with a busy wait, if that is enabled, and then in the kernel.

use std::time::{Duration, Instant};

use crate::api::Host;
use crate::command::Command;
use crate::links::Links;
use starwire_net::reactor::mailbox::Receiver;
use starwire_net::reactor::polling::{Polling, involuntary_switches};

/// The longest busy wait before a sleep, where polling is on.
const LONGEST_SPIN: Duration = Duration::from_micros(200);
/// Looks at the sockets between two checks whether spinning takes CPU time from other threads.
const LOOKS_PER_QUESTION: u32 = 64;

pub struct Waiter {
    polling: Polling,
    /// Looks at the sockets by busy waits.
    looks: u32,
}

impl Waiter {
    pub fn new(polls: bool) -> Self {
        Self { polling: if polls { Polling::up_to(LONGEST_SPIN) } else { Polling::off() }, looks: 0 }
    }

    /// Waits for completions, commands, or `until`.
    pub fn wait<H: Host>(
        &mut self,
        links: &mut Links<H>,
        mailbox: &mut Receiver<Command<H>>,
        now: Instant,
        until: Option<Instant>,
    ) {
        let timeout = until.map(|until| until.saturating_duration_since(now));
        let is_due = timeout == Some(Duration::ZERO);
        if !is_due && self.polling.is_on() && self.spin(links, mailbox, now) {
            return;
        }
        if is_due || !mailbox.prepare_sleep() {
            links.wait(Some(Duration::ZERO));
            return;
        }
        links.metrics().sleeps.add(1);
        links.wait(timeout);
        if mailbox.awake() {
            links.metrics().wakes.add(1);
        }
        if self.polling.is_on() {
            self.polling.arrived_after(now.elapsed());
        }
    }

    /// True if work arrived within the budget.
    fn spin<H: Host>(&mut self, links: &mut Links<H>, mailbox: &Receiver<Command<H>>, since: Instant) -> bool {
        let budget = self.polling.budget(since);
        loop {
            let idle = since.elapsed();
            if idle >= budget {
                return false;
            }
            if links.wait(Some(Duration::ZERO)) || !mailbox.is_empty() {
                self.polling.arrived_after(idle);
                return true;
            }
            self.looks = self.looks.wrapping_add(1);
            if self.looks % LOOKS_PER_QUESTION == 0 {
                self.polling.preempted(Instant::now(), involuntary_switches());
            }
            std::hint::spin_loop();
        }
    }
}
