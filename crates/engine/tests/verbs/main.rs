//! RDMA without hardware: all tests run against the fake libibverbs of `fake/`, loaded with `dlopen` like a real one.

mod driver;
mod farewell;
mod faults;
#[path = "../engine/harness.rs"]
#[allow(dead_code, reason = "shared with the tests of the engine")]
mod harness;
mod layout;
mod pair;
mod registrations;
