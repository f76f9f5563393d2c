//! Variables that begin with `STARWIRE_` and are none of starwire's: most are misspelt.

use super::env::Env;
use super::row::Variable;
use super::variables::VARIABLES;

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
    "STARWIRE_SIM_",
    "STARWIRE_FUZZ_ROUNDS",
    "STARWIRE_REQUIRE_IO_URING",
];

/// One warning for each `STARWIRE_*` variable that has no effect.
pub fn unread_variables(env: &dyn Env) -> Vec<String> {
    let mut unread: Vec<String> = env.names().into_iter().filter(|name| is_unread(name)).collect();
    unread.sort_unstable();
    let warning = |name: String| match nearest(&name) {
        Some(known) => format!("{name} is set but is not a variable of starwire; did you mean {known}?"),
        None => format!("{name} is set but is not a variable of starwire"),
    };
    unread.into_iter().map(warning).collect()
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
            .set("STARWIRE_KEEPALIV", "1")
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
                "STARWIRE_KEEPALIV is set but is not a variable of starwire; did you mean STARWIRE_KEEPALIVE?",
            ]
        );
    }

    #[test]
    fn edit_distances() {
        for (a, b, distance) in [("", "", 0), ("a", "", 1), ("", "ab", 2), ("kitten", "sitting", 3), ("abc", "abc", 0)]
        {
            assert_eq!(edit_distance(a, b), distance);
        }
    }
}
