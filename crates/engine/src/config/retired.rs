//! Variables that earlier versions read, and variables that no version reads.

use super::env::Env;
use super::row::Variable;
use super::variables::VARIABLES;

/// A variable that is no longer read.
pub struct Retired {
    pub name: &'static str,
    /// What to do now.
    pub instead: &'static str,
    pub reason: &'static str,
}

const ONE_OF_MANY: &str = "Several limits that are rarely set have become one variable.";

const fn folded(name: &'static str, instead: &'static str) -> Retired {
    Retired { name, instead, reason: ONE_OF_MANY }
}

const fn dropped(name: &'static str, instead: &'static str, reason: &'static str) -> Retired {
    Retired { name, instead, reason }
}

pub static RETIRED: &[Retired] = &[
    folded("STARWIRE_TENSOR_FUSE_SMALL_BYTES", "set STARWIRE_TENSOR_FUSE_LIMITS=small=…"),
    folded("STARWIRE_TENSOR_FUSE_LARGE_BYTES", "set STARWIRE_TENSOR_FUSE_LIMITS=large=…"),
    folded("STARWIRE_TENSOR_FUSE_GROUP_BYTES", "set STARWIRE_TENSOR_FUSE_LIMITS=group=…"),
    folded("STARWIRE_TENSOR_FUSE_WAIT_US", "set STARWIRE_TENSOR_FUSE_LIMITS=wait_us=…"),
    folded("STARWIRE_TENSOR_FUSE_MESSAGE_US", "set STARWIRE_TENSOR_FUSE_LIMITS=message_us=…"),
    dropped(
        "STARWIRE_TENSOR_FUSE_GROUP_ITEMS",
        "unset it; STARWIRE_TENSOR_FUSE_LIMITS=group=… limits a group by its bytes",
        "A group has at most 1024 tensors; its bytes are the limit that matters.",
    ),
    dropped(
        "STARWIRE_TENSOR_FUSE_CONTROL",
        "unset it; STARWIRE_TENSOR_FUSE=false turns tensor_fuse off",
        "For debugging the planner. Control dependencies are always fused.",
    ),
    dropped(
        "STARWIRE_TENSOR_FUSE_LOOPS",
        "unset it; STARWIRE_TENSOR_FUSE=false turns tensor_fuse off",
        "For debugging the planner. Tensors within loops are always fused.",
    ),
    folded("STARWIRE_STAR_MAX_PLANS", "set STARWIRE_STAR_LIMITS=plans=…"),
    folded("STARWIRE_STAR_MAX_PLAN_BYTES", "set STARWIRE_STAR_LIMITS=plan_bytes=…"),
    folded("STARWIRE_STAR_MAX_SLOTS", "set STARWIRE_STAR_LIMITS=values=…"),
    folded("STARWIRE_STAR_MAX_SLOT_BYTES", "set STARWIRE_STAR_LIMITS=value_bytes=…"),
    folded("STARWIRE_STAR_MAX_CALLS", "set STARWIRE_STAR_LIMITS=calls=…"),
    folded("STARWIRE_STAR_PLAN_IDLE_S", "set STARWIRE_STAR_LIMITS=plan_idle_s=…"),
    folded("STARWIRE_STAR_SESSION_IDLE_S", "set STARWIRE_STAR_LIMITS=session_idle_s=…"),
    dropped("STARWIRE_STAR_STEP_IDLE_S", "unset it", "A step keeps its values until it ends, or its connection does."),
    dropped(
        "STARWIRE_METRICS",
        "set STARWIRE_CONTROL=off, or STARWIRE_CONTROL=loopback",
        "It only hid numbers that `STARWIRE_CONTROL` hides as well.",
    ),
    dropped(
        "STARWIRE_MAX_INFLIGHT",
        "unset it; a connection has at most 65536 unanswered requests",
        "An internal limit of the transport; further requests wait at the sender.",
    ),
    dropped(
        "STARWIRE_EXECUTOR",
        "unset it; TensorFlow's executor runs every partition",
        "Steps over `grpc++` gained 1.16 times at most, those of CTR models nothing.",
    ),
];

/// Variables of the build, the tests and the benchmarks begin with one of these.
pub const FOREIGN_PREFIXES: [&str; 11] = [
    "STARWIRE_TEST_",
    "STARWIRE_BENCH_",
    "STARWIRE_TF_",
    "STARWIRE_PYTHON",
    "STARWIRE_PCH",
    "STARWIRE_CARGO_FLAGS",
    "STARWIRE_DEEP_TESTS",
    "STARWIRE_STARCTL",
    "STARWIRE_SIM_SEED",
    "STARWIRE_FUZZ_ROUNDS",
    "STARWIRE_REQUIRE_IO_URING",
];

/// One warning for each `STARWIRE_*` variable that has no effect.
pub fn unread_variables(env: &dyn Env) -> Vec<String> {
    let mut unread: Vec<String> = env.names().into_iter().filter(|name| is_unread(name)).collect();
    unread.sort_unstable();
    let warning = |name: String| match (RETIRED.iter().find(|retired| retired.name == name), nearest(&name)) {
        (Some(retired), _) => {
            format!("{name} is set but is no longer read: {}", retired.instead)
        }
        (None, Some(known)) => format!("{name} is set but is not a variable of starwire; did you mean {known}?"),
        (None, None) => format!("{name} is set but is not a variable of starwire"),
    };
    unread.into_iter().map(warning).collect()
}

/// The table of `docs/configuration.md`.
pub fn markdown() -> String {
    let mut out = String::from("| variable | now | why |\n|---|---|---|\n");
    for Retired { name, instead, reason } in RETIRED {
        let quoted = |word: &str| if word.starts_with("STARWIRE_") { format!("`{word}`") } else { word.to_owned() };
        let instead = instead.split(' ').map(quoted).collect::<Vec<_>>().join(" ").replace(",`", "`,");
        out += &format!("| `{name}` | {instead} | {reason} |\n");
    }
    out
}

fn is_unread(name: &str) -> bool {
    name.starts_with("STARWIRE_")
        && !FOREIGN_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        && !VARIABLES.iter().any(|variable| variable.name() == name)
}

fn nearest(name: &str) -> Option<&'static str> {
    let distance = |variable: &&dyn Variable| (edit_distance(name, variable.name()), variable.name());
    let (distance, known) = VARIABLES.iter().map(distance).min()?;
    (distance <= 4).then_some(known)
}

fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &cb) in b.iter().enumerate() {
            let replace = diagonal + usize::from(ca != cb);
            diagonal = row[j + 1];
            row[j + 1] = replace.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::super::env::MapEnv;
    use super::*;

    #[test]
    fn unknown_variables_are_named_with_the_nearest_known_one() {
        let env = MapEnv::new("/")
            .set("STARWIRE_KEEPALIVE", "1")
            .set("STARWIRE_DRIVRE", "epoll")
            .set("STARWIRE_COMPLETELY_DIFFERENT", "1")
            .set("STARWIRE_UNIX", "off")
            .set("STARWIRE_TEST_PROTOCOL", "x")
            .set("HOME", "/");
        assert_eq!(
            unread_variables(&env),
            [
                "STARWIRE_COMPLETELY_DIFFERENT is set but is not a variable of starwire",
                "STARWIRE_DRIVRE is set but is not a variable of starwire; did you mean STARWIRE_DRIVER?",
                "STARWIRE_KEEPALIVE is set but is not a variable of starwire; did you mean STARWIRE_KEEPALIVE_MS?",
            ]
        );
    }

    #[test]
    fn retired_variables_lead_to_what_replaced_them() {
        for retired in RETIRED {
            let expected = format!("{} is set but is no longer read: {}", retired.name, retired.instead);
            assert_eq!(unread_variables(&MapEnv::new("/").set(retired.name, "1")), [expected]);
            let words = retired.instead.split([' ', '=', ';']).filter(|word| word.starts_with("STARWIRE_"));
            for word in words {
                assert!(VARIABLES.iter().any(|variable| variable.name() == word), "{}: {word}", retired.name);
            }
        }
    }

    #[test]
    fn edit_distances() {
        for (a, b, distance) in [("", "", 0), ("a", "", 1), ("", "ab", 2), ("kitten", "sitting", 3), ("abc", "abc", 0)]
        {
            assert_eq!(edit_distance(a, b), distance);
        }
    }
}
