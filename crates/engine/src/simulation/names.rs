//! A name service: answers late, wrongly, or not at all.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::address;
use super::net::Net;
use super::owner::Owner;
use crate::resolver::LookUp;
use crate::shared::Shared;
use starwire_protocol::Failure;

/// Nobody is there.
const WRONG: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 9, 9)), 1000);

/// The name and port of a task.
pub fn of(task: usize) -> String {
    format!("task{task}.sim:1000")
}

/// Look-ups on their way, and when they end.
#[derive(Default)]
pub struct Names(Vec<(Instant, LookUp<Owner>, io::Result<Vec<SocketAddr>>)>);

/// Leaves a look-up with its task.
#[expect(clippy::unnecessary_wraps, reason = "as a name service that may fail at once")]
pub fn ask(look_up: LookUp<Owner>) -> Result<(), Failure> {
    let shared = look_up.shared.clone();
    shared.host.look_ups.lock().unwrap().push(look_up);
    Ok(())
}

impl Names {
    /// Takes the look-ups of a task.
    pub fn take(&mut self, shared: &Arc<Shared<Owner>>, net: &mut Net) {
        for look_up in std::mem::take(&mut *shared.host.look_ups.lock().unwrap()) {
            let number = look_up.target.host.trim_start_matches("task").trim_end_matches(".sim");
            let right = address(number.parse().expect("the name of a task"));
            let (found, most) = match if net.is_faulty { net.below(10) } else { 9 } {
                0 => {
                    net.note("a name is unknown");
                    (Err(io::Error::new(io::ErrorKind::NotFound, "no such name")), 2000)
                }
                1 => (Ok(vec![WRONG, right]), 50),
                2 => {
                    net.note("a name has a wrong address");
                    (Ok(vec![WRONG]), 50)
                }
                3 => {
                    net.note("a look-up takes long");
                    (Ok(vec![right]), 20_000)
                }
                _ => (Ok(vec![right]), 50),
            };
            let due = net.now + Duration::from_millis(net.below(most));
            self.0.push((due, look_up, found));
        }
    }

    /// Ends what is due.
    pub fn answer(&mut self, now: Instant) {
        let (due, left) = std::mem::take(&mut self.0).into_iter().partition(|(at, ..)| *at <= now);
        self.0 = left;
        let due: Vec<_> = due;
        for (_, look_up, found) in due {
            look_up.shared.host.ask();
            look_up.end(found);
        }
    }

    pub fn next_due(&self) -> Option<Instant> {
        self.0.iter().map(|(at, ..)| *at).min()
    }

    /// The task is dead.
    pub fn forget(&mut self, shared: &Arc<Shared<Owner>>) {
        shared.host.look_ups.lock().unwrap().clear();
        self.0.retain(|(_, look_up, _)| !Arc::ptr_eq(&look_up.shared, shared));
    }
}
