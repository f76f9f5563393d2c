//! What the seed of a simulation says about it.

use crate::random::Random;

/// What happens beside requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scenario {
    /// Everything.
    Faults,
    /// The machine stands still now and then. All connections are open before.
    Stalls,
    /// Tasks stop in order, and start again.
    Restarts,
    /// Connections are reset, after each task has reached each, and nothing else happens: no star call whose plan ends
    /// by itself may fail.
    Resets,
}

impl Scenario {
    pub const ALL: [Self; 4] = [Self::Faults, Self::Stalls, Self::Restarts, Self::Resets];
}

/// Of a simulation.
pub const MOST_TASKS: usize = 24;

/// The seeds up to this one do what they did before there were clients that are no tasks, values that stay on servers,
/// and reactors that sleep.
pub const LAST_EARLY: u64 = 17;

pub struct Setup {
    pub scenario: Scenario,
    pub tasks: usize,
    pub has_secret: bool,
    pub has_tls: bool,
    pub has_names: bool,
    /// Odd seeds repeat what they did before there were TLS, names, resets, and tasks that die at fail points.
    pub has_more: bool,
    pub has_clients: bool,
    pub is_early: bool,
    /// A reactor runs only if it has a reason to. Otherwise all run all the time.
    pub sleeps: bool,
    /// Servers have low limits for star calls.
    pub is_tight: bool,
    /// Takes time.
    pub checks_always: bool,
    pub settings: Vec<(&'static str, String)>,
    pub random: Random,
}

impl Setup {
    /// Two tasks, and nothing that happens to them. With this time until a silent peer is asked, and to answer.
    pub fn quiet(after_ms: u64, timeout_ms: u64, has_tls: bool) -> Self {
        let settings = vec![
            ("STARWIRE_UNIX", "off".to_owned()),
            ("STARWIRE_KEEPALIVE", format!("after_ms={after_ms},timeout_ms={timeout_ms}")),
        ];
        Self {
            scenario: Scenario::Stalls,
            tasks: 2,
            has_secret: false,
            has_tls,
            has_names: false,
            has_more: false,
            has_clients: false,
            is_early: false,
            sleeps: true,
            is_tight: false,
            checks_always: true,
            settings,
            random: Random(1),
        }
    }

    pub fn of(seed: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let mut some = |values: &[u64]| values[random.below(values.len() as u64) as usize].to_string();
        let mut settings = vec![
            ("STARWIRE_UNIX", "off".to_owned()),
            (
                "STARWIRE_KEEPALIVE",
                format!("after_ms={},timeout_ms={}", some(&[100, 1000, 5000]), some(&[500, 3000, 15_000])),
            ),
            ("NETWORK_MAX_CONNECTION_TIMEOUT", some(&[500, 2000, 10_000])),
        ];
        let mut scenario = match random.below(4) {
            0 => Scenario::Stalls,
            1 => Scenario::Restarts,
            _ => Scenario::Faults,
        };
        let has_secret = random.below(3) == 0;
        let mut tasks = 2 + random.below(3) as usize;
        let (mut has_tls, mut has_names) = (false, false);
        let has_more = seed % 2 == 0;
        if has_more {
            has_tls = !has_secret && random.below(2) == 0;
            has_names = random.below(3) == 0;
            if scenario == Scenario::Faults && random.below(3) == 0 {
                scenario = Scenario::Resets;
            }
            // Seldom dozens, which take their time.
            if random.below(12) == 0 {
                tasks = MOST_TASKS;
            }
        }
        let is_early = seed <= LAST_EARLY;
        let has_clients = has_more && !is_early;
        // Random numbers of their own: all else of a seed stays what it is.
        let mut others = Random(seed.wrapping_mul(0xD134_2543_DE82_EF95) | 1);
        let is_tight = has_clients && scenario == Scenario::Faults && others.below(3) == 0;
        if has_clients {
            let mut some = |values: &[u64]| values[random.below(values.len() as u64) as usize];
            let mut limits = format!("plan_idle_s={},inline_us={}", some(&[1, 10, 3600]), some(&[0, 250]));
            if is_tight {
                let mut some = |values: &[u64]| values[others.below(values.len() as u64) as usize];
                let (plans, values, bytes) = (some(&[2, 4096]), some(&[0, 2, 65_536]), some(&[8, 1 << 30]));
                limits += &format!(",plans={plans},values={values},value_bytes={bytes},calls={}", some(&[1, 4, 1024]));
            }
            settings.push(("STARWIRE_STAR_LIMITS", limits));
        }
        let sleeps = !is_early && seed % 16 != 0;
        Self {
            scenario,
            tasks,
            has_secret,
            has_tls,
            has_names,
            has_more,
            has_clients,
            is_early,
            sleeps,
            is_tight,
            checks_always: !is_early && seed % 4 == 1,
            settings,
            random,
        }
    }

    /// Its scenario with each way in which its tasks find and trust each other.
    pub fn kinds(&self) -> Vec<(Scenario, &'static str)> {
        let ways = [(self.has_tls, "TLS"), (self.has_secret, "secret"), (self.has_names, "names")];
        ways.into_iter().filter(|(has, _)| *has).map(|(_, way)| (self.scenario, way)).collect()
    }
}
