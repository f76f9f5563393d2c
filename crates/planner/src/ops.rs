//! The op table, [`ops.txt`](ops.txt): what is known about TensorFlow's operations. Everything that reasons about a
//! graph uses it.
//!
//! It is an allow-list. An operation that is not in it has no [`Knowledge`]: the planners leave it where it is and
//! assume that it may wait and may change anything that it can reach, and no reactor runs it.

use std::collections::{BTreeMap, HashMap};
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
    /// Not in `ops.txt`: see [`Added`].
    pub added: bool,
}

impl Knowledge {
    /// An error is the word that is unknown.
    fn parse(words: &str) -> Result<Self, &str> {
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
                _ => return Err(word),
            };
            *field = true;
        }
        all.pure |= all.constant;
        all.named |= all.constant;
        Ok(all)
    }

    /// Why no operation can be like this.
    fn contradiction(self) -> Option<&'static str> {
        let effects = self.updates || self.session || self.waits || self.files || self.checks;
        let promises = self.is_pure() || effects || self.reads || self.variable || self.forwards;
        [
            (!promises, "it needs one of pure, constant, checks, variable, reads, updates, session, waits and files"),
            (self.is_pure() && (effects || self.reads || self.variable), "what is pure has no effects"),
            (self.reads && (effects || self.forwards), "what only reads has no effects"),
            (self.variable && !self.named, "a variable is found by name: `variable named`"),
            (self.linear.is_some() && (self.waits || self.files), "what waits, or uses files, is not linear"),
        ]
        .into_iter()
        .find_map(|(wrong, why)| wrong.then_some(why))
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

const WORDS: &str = "pure constant checks variable named reads updates forwards session waits files linear, and \
                     a number after linear";

/// None: nothing is known, and nothing may be assumed.
pub fn knowledge(op: &str) -> Option<Knowledge> {
    built_in(op).or_else(|| Some(ADDED.get()?.entries.get(op)?.knowledge))
}

fn built_in(op: &str) -> Option<Knowledge> {
    static TABLE: OnceLock<HashMap<&'static str, Knowledge>> = OnceLock::new();
    TABLE.get_or_init(|| entries().collect()).get(op).copied()
}

/// The entries of `ops.txt`.
pub fn entries() -> impl Iterator<Item = (&'static str, Knowledge)> {
    let mut section = None;
    parts(include_str!("ops.txt")).flat_map(move |(_, part)| {
        let names = match part {
            Part::Heading(words) => {
                section = Knowledge::parse(words).ok();
                ""
            }
            Part::Names(names) => names,
        };
        let known = section;
        names.split_whitespace().filter_map(move |name| Some((name, known?)))
    })
}

enum Part<'a> {
    Heading(&'a str),
    Names(&'a str),
}

/// A table's lines, with their numbers, without comments and empty ones.
fn parts(text: &str) -> impl Iterator<Item = (usize, Part<'_>)> {
    (1..).zip(text.lines()).filter_map(|(number, line)| {
        let line = line.split('#').next().unwrap_or_default().trim();
        let part = match line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            Some(words) => Part::Heading(words),
            None => Part::Names(line),
        };
        (!line.is_empty()).then_some((number, part))
    })
}

/// A team's own operations: a table in the format of `ops.txt`, which adds to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Added {
    entries: BTreeMap<String, Entry>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    knowledge: Knowledge,
    /// FILE:LINE
    place: String,
}

static ADDED: OnceLock<Added> = OnceLock::new();

/// Names the file and the line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {reason}")]
pub struct TableError {
    place: String,
    reason: String,
}

impl Added {
    /// `file` is for messages.
    pub fn parse(file: &str, text: &str) -> Result<Self, TableError> {
        let mut section = None;
        let mut entries: BTreeMap<String, Entry> = BTreeMap::new();
        for (line, part) in parts(text) {
            let place = format!("{file}:{line}");
            let refuse = |reason: String| Err(TableError { place: place.clone(), reason });
            let names = match part {
                Part::Heading(words) => {
                    let known = match Knowledge::parse(words) {
                        Ok(known) if !known.control => known,
                        Ok(_) => return refuse("operations of control flow cannot be added".to_owned()),
                        Err(word) => return refuse(format!("{word:?} is none of the words of a section: {WORDS}")),
                    };
                    if let Some(why) = known.contradiction() {
                        return refuse(format!("[{words}] contradicts itself: {why}"));
                    }
                    section = Some(known);
                    continue;
                }
                Part::Names(names) => names,
            };
            let Some(knowledge) = section else {
                return refuse("an operation before the first section, such as [pure]".to_owned());
            };
            for name in names.split_whitespace() {
                if !is_name(name) {
                    return refuse(format!("{name:?} is no name of an operation"));
                }
                if built_in(name).is_some() {
                    return refuse(format!("{name} is in starwire's own table, which cannot be changed"));
                }
                let entry = Entry { knowledge: Knowledge { added: true, ..knowledge }, place: place.clone() };
                if let Some(first) = entries.insert(name.to_owned(), entry) {
                    return refuse(format!("{name} is also at {}", first.place));
                }
            }
        }
        Ok(Self { entries })
    }

    /// Adds the table for the rest of the process. Another one cannot follow.
    pub fn install(self) -> Result<(), TableError> {
        let wanted = self.clone();
        let installed = ADDED.get_or_init(|| self);
        let different = || wanted.entries.values().chain(installed.entries.values()).next();
        match installed == &wanted {
            true => Ok(()),
            false => Err(TableError {
                place: different().map(|entry| entry.place.clone()).unwrap_or_default(),
                reason: "this process already uses another table".to_owned(),
            }),
        }
    }
}

/// As TensorFlow has them: `Name`, `_Name`, `Library>Name`.
fn is_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '>'))
}

/// The added operations: name, and FILE:LINE.
pub fn added() -> impl Iterator<Item = (&'static str, &'static str)> {
    ADDED.get().into_iter().flat_map(|added| &added.entries).map(|(name, entry)| (name.as_str(), entry.place.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_well_formed() {
        let headings = include_str!("ops.txt").lines().filter(|line| line.starts_with('['));
        for heading in headings {
            let words = heading.trim_matches(['[', ']']);
            assert!(Knowledge::parse(words).is_ok(), "a section with an unknown word: {heading}");
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
            assert_eq!(it.contradiction(), None, "{name}");
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

    fn refused(text: &str) -> String {
        Added::parse("t", text).unwrap_err().to_string()
    }

    #[test]
    fn an_added_table_has_the_format_of_the_own() {
        let text = "# ours\n[updates linear]\nTeam>Push Team>Pull # rows\n\n[pure linear 2]\nTeamHash\n";
        let added = Added::parse("t", text).unwrap();
        let of = |name: &str| added.entries.get(name).cloned().unwrap();
        assert!(of("Team>Push").knowledge.updates && of("Team>Pull").place == "t:3");
        assert_eq!((of("TeamHash").knowledge.linear, of("TeamHash").place.as_str()), (Some(2), "t:6"));
        assert_eq!(Added::parse("t", "# nothing\n").unwrap().entries.len(), 0);
    }

    #[test]
    fn errors_of_an_added_table_name_the_line() {
        for (text, error) in [
            ("[pure\nA\n", "t:1: an operation before the first section, such as [pure]"),
            ("\nA\n", "t:2: an operation before the first section, such as [pure]"),
            ("[control]\nA\n", "t:1: operations of control flow cannot be added"),
            ("[pure updates]\n", "t:1: [pure updates] contradicts itself: what is pure has no effects"),
            ("[reads session]\n", "t:1: [reads session] contradicts itself: what only reads has no effects"),
            ("[variable]\n", "t:1: [variable] contradicts itself: a variable is found by name: `variable named`"),
            ("[files linear]\n", "t:1: [files linear] contradicts itself: what waits, or uses files, is not linear"),
            ("[pure]\nA\n[files]\nB A\n", "t:4: A is also at t:2"),
            ("[files]\nMatMul\n", "t:2: MatMul is in starwire's own table, which cannot be changed"),
            ("[files]\nA,B\n", "t:2: \"A,B\" is no name of an operation"),
        ] {
            assert_eq!(refused(text), error);
        }
        assert!(refused("[quick]\n").starts_with("t:1: \"quick\" is none of the words of a section: pure "));
        assert!(refused("[]\n").starts_with("t:1: [] contradicts itself: it needs one of "));
        assert!(refused("[linear]\n").contains("it needs one of "));
        assert!(refused("[linear 300]\n").contains("\"300\" is none of "));
    }

    #[test]
    fn one_added_table_holds_for_the_process() {
        let table = |text: &str| Added::parse("t", text).unwrap();
        assert_eq!(knowledge("OnlyHere"), None);
        table("[files]\nOnlyHere\n").install().unwrap();
        assert!(knowledge("OnlyHere").unwrap().files);
        assert_eq!(added().collect::<Vec<_>>(), [("OnlyHere", "t:2")]);
        table("[files]\nOnlyHere\n").install().unwrap();
        let other = table("[pure]\nOnlyHere\n").install().unwrap_err();
        assert_eq!(other.to_string(), "t:2: this process already uses another table");
        assert!(knowledge("OnlyHere").unwrap().files);
    }
}
