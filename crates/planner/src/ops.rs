//! The op table, [`ops.txt`](ops.txt): what is known about TensorFlow's operations. Everything that reasons about a
//! graph uses it.
//!
//! It is an allow-list. An operation that is not in it has no [`Knowledge`]: the planners leave it where it is and
//! assume that it may wait and may change anything that it can reach, and no reactor runs it.

use std::collections::HashMap;
use std::sync::OnceLock;

/// The table's entry for one operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Knowledge {
    /// A function of its inputs' values: may run anywhere, at any time, any number of times.
    pub pure: bool,
    /// A value that never changes: pure, and without inputs.
    pub constant: bool,
    /// Part of the control flow; the node's kind says which.
    pub control: bool,
    /// Runs once and keeps nothing: it checks something, or prints it.
    pub checks: bool,
    pub variable: bool,
    /// A variable or object that is found by name: a copy of the node is the same one.
    pub named: bool,
    /// Reads the variable behind input 0 and does nothing else.
    pub reads: bool,
    /// Changes the variables behind the references and handles that it takes.
    pub updates: bool,
    /// Output 0 is the reference that it takes as input 0.
    pub forwards: bool,
    /// Its kernel, or an object of the session that it uses, keeps state between runs.
    pub session: bool,
    /// May wait for something that is not an edge of its graph, with an asynchronous kernel, or is waited for in this
    /// way.
    pub waits: bool,
    /// Reads or writes files.
    pub files: bool,
    /// Takes time and memory linear in its inputs and outputs, and the dimensions of its outputs follow from those of
    /// its inputs, if the last so many inputs are constants.
    pub linear: Option<u8>,
}

impl Knowledge {
    fn parse(words: &str) -> Option<Self> {
        let mut all = Self::default();
        for word in words.split_whitespace() {
            if let (Some(constants), Ok(number)) = (&mut all.linear, word.parse()) {
                *constants = number;
                continue;
            }
            let field = match word {
                "pure" => &mut all.pure,
                "constant" => &mut all.constant,
                "control" => &mut all.control,
                "checks" => &mut all.checks,
                "variable" => &mut all.variable,
                "named" => &mut all.named,
                "reads" => &mut all.reads,
                "updates" => &mut all.updates,
                "forwards" => &mut all.forwards,
                "session" => &mut all.session,
                "waits" => &mut all.waits,
                "files" => &mut all.files,
                "linear" => {
                    all.linear = Some(0);
                    continue;
                }
                _ => return None,
            };
            *field = true;
        }
        all.pure |= all.constant;
        all.named |= all.constant;
        Some(all)
    }

    /// Has no observable effect beyond its outputs.
    pub fn is_pure(self) -> bool {
        self.pure || self.control
    }

    /// Its kernel keeps no state except in objects found by name, so several sessions can share one kernel.
    pub fn is_shareable(self) -> bool {
        !self.session && !self.waits
    }
}

/// None: nothing is known, and nothing may be assumed.
pub fn knowledge(op: &str) -> Option<Knowledge> {
    static TABLE: OnceLock<HashMap<&'static str, Knowledge>> = OnceLock::new();
    TABLE.get_or_init(|| entries().collect()).get(op).copied()
}

pub fn entries() -> impl Iterator<Item = (&'static str, Knowledge)> {
    let mut section = None;
    include_str!("ops.txt").lines().flat_map(move |line| {
        let line = line.split('#').next().unwrap_or_default().trim();
        let heading = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        if let Some(words) = heading {
            section = Knowledge::parse(words);
        }
        let names = if heading.is_some() { "" } else { line };
        let known = section;
        names.split_whitespace().filter_map(move |name| Some((name, known?)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_well_formed() {
        let headings = include_str!("ops.txt").lines().filter(|line| line.starts_with('['));
        for heading in headings {
            let words = heading.trim_matches(['[', ']']);
            assert!(Knowledge::parse(words).is_some(), "a section with an unknown word: {heading}");
        }
        let mut names: Vec<&str> = entries().map(|(name, _)| name).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all, "an operation stands in two sections");
        assert!(all > 1000);
    }

    #[test]
    fn entries_do_not_contradict_themselves() {
        for (name, it) in entries() {
            let effects = it.updates || it.session || it.waits || it.files || it.checks;
            assert!(!(it.is_pure() && (effects || it.reads || it.variable)), "{name} is pure and is not");
            assert!(!(it.reads && (effects || it.forwards)), "{name} only reads and does not");
            assert!(!it.variable || it.named, "{name} is a variable without a name");
            assert!(it.linear.is_none() || !(it.waits || it.files), "{name} is linear and waits");
        }
    }

    #[test]
    fn unknown_operations_are_not_guessed() {
        for name in ["Unstage", "MapUnstage", "PyFunc", "InplaceUpdate", "MyCustomOp", "pure", "[pure]", ""] {
            assert_eq!(knowledge(name), None, "{name}");
        }
        let known = |name: &str| knowledge(name).unwrap_or_default();
        assert!(known("Mul").pure && known("Const").constant && known("Const").named);
        assert!(known("AssignAdd").updates && known("AssignAdd").forwards && !known("CountUpTo").forwards);
        assert!(known("ReadFile").files && known("ReadFile").is_shareable());
        assert!(known("_Send").waits && known("_Recv").waits);
        assert_eq!(
            (known("Mul").linear, known("GatherV2").linear, known("OneHot").linear),
            (Some(0), Some(1), Some(3))
        );
        for name in ["MatMul", "Fill", "RandomUniform", "Unique", "NextIteration", "Print", "ReadFile", "_Send"] {
            assert_eq!(known(name).linear, None, "{name}");
        }
        // A lookup in an embedding variable counts the key, and may add it.
        let lookup = known("KvResourceGather");
        assert!(lookup.updates && !lookup.reads && known("KvVarHandleOp").variable && known("KvVariableShape").reads);
        assert_eq!(knowledge("_OPT_KvResourceLookupID"), None, "its result is an address");
        assert!(known("QueueDequeueV2").waits && !known("LookupTableFindV2").is_shareable());
    }
}
