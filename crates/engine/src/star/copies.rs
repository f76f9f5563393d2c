//! Copies of the state in other processes of the task, and how one of them takes it over. Each asks for one piece after
//! the other; what it asks for next says what it has.
//!
//! A take-over has two steps. The owner lets no change in and writes what is left; when the other process has that on
//! its disk, the owner marks its folder, and from then on answers nobody. If the other process is not heard of in
//! between, the owner goes on.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::StarFailure;
use crate::api::{OutPayload, Ticket};
use starwire_protocol::code;
use starwire_protocol::state::{Position, StateReply, StateRequest, TAIL, checksum};
use starwire_state::{Source, StateError};

/// A copy that asks for nothing new is answered after this time.
pub const HEARTBEAT: Duration = Duration::from_millis(500);
/// For so long, the owner waits for a process that takes over.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// For so long, a server that stops sends its peers to the process that has taken over.
pub const FAREWELL: Duration = Duration::from_secs(2);

/// Says to the other process that it does not have the state.
const GIVEN_UP: &str = "the take-over was given up";

/// A reply to another process.
pub struct CopyReply {
    pub ticket: Ticket,
    pub head: StateReply,
    pub payload: Option<OutPayload>,
}

/// How far a take-over is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TakeOver {
    No,
    /// Another process wants the state.
    Asked {
        ticket: Ticket,
        address: String,
    },
    /// No change follows after this, until the time has passed.
    Prepared {
        conn: u64,
        position: Position,
        address: String,
        until: Instant,
    },
    /// The state belongs to the process at this address.
    Done {
        position: Position,
        address: String,
    },
}

#[derive(Default)]
pub struct Copies {
    known: Mutex<Known>,
}

struct Known {
    /// Open connections that have asked for something.
    open: HashSet<u64>,
    /// By connection.
    copies: HashMap<u64, Copy>,
    /// Where the commits of each journal end.
    ends: BTreeMap<u64, u64>,
    take_over: TakeOver,
    /// The owner stops, and offers the state.
    offers: bool,
    /// A copy has become complete: a new journal makes its take-over short.
    wants_journal: bool,
    /// Flushes of a synchronous state that copies do not have yet.
    unconfirmed: VecDeque<(Position, u64)>,
}

/// What a copy gets that asks for more of a journal.
enum Wait {
    /// Bytes, of those before this.
    Reads(u64),
    Ends(StateReply),
    Waits,
}

struct Copy {
    source: Arc<Mutex<Source>>,
    /// It has everything before this.
    position: Position,
    /// It has once had everything: who waits for a flush waits for it, too.
    is_complete: bool,
    /// It waits for what comes next.
    waits: Option<(Ticket, Instant)>,
}

impl Default for Known {
    fn default() -> Self {
        Self {
            open: HashSet::new(),
            copies: HashMap::new(),
            ends: BTreeMap::new(),
            take_over: TakeOver::No,
            offers: false,
            wants_journal: false,
            unconfirmed: VecDeque::new(),
        }
    }
}

impl Known {
    fn newest(&self) -> Position {
        self.ends
            .last_key_value()
            .map_or_else(Position::default, |(journal, end)| Position { journal: *journal, offset: *end })
    }

    /// So many bytes follow.
    fn left(&self, position: Position) -> u64 {
        let of = |(journal, end): (&u64, &u64)| {
            if *journal == position.journal { end.saturating_sub(position.offset) } else { *end }
        };
        self.ends.range(position.journal..).map(of).sum()
    }

    /// The flushes that all complete copies have.
    fn confirmed(&mut self) -> Option<u64> {
        let order = |position: &Position| (position.journal, position.offset);
        let least = self.copies.values().filter(|copy| copy.is_complete).map(|copy| order(&copy.position)).min();
        let is_there = |(position, _): &(Position, u64)| least.is_none_or(|least| order(position) <= least);
        let count = self.unconfirmed.iter().take_while(|flush| is_there(flush)).count();
        self.unconfirmed.drain(..count).next_back().map(|(_, number)| number)
    }
}

impl Copies {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection asks for something. On its reactor, before anything else and before [`Copies::gone`].
    pub fn asks(&self, conn: u64) {
        self.known().open.insert(conn);
    }

    /// Another process begins a copy. May block.
    pub fn begin(&self, ticket: Ticket, folder: &Path, state: u64) -> Result<CopyReply, StateError> {
        let Some(source) = Source::open(folder)? else {
            return Ok(CopyReply { ticket, head: StateReply::Nothing, payload: None });
        };
        let each = source.variables().iter().flat_map(|(id, bytes)| [u64::from(*id), *bytes]);
        let list: Vec<u8> = each.flat_map(u64::to_le_bytes).collect();
        let head = StateReply::Begun { journal: source.first_journal(), state };
        self.add(ticket, source, Position::default());
        Ok(CopyReply { ticket, head, payload: Some(OutPayload::of(vec![list])) })
    }

    fn add(&self, ticket: Ticket, source: Source, position: Position) {
        let source = Arc::new(Mutex::new(source));
        let mut known = self.known();
        // Of one that was closed meanwhile, nothing would remove the copy again.
        if known.open.contains(&ticket.conn) {
            known.copies.insert(ticket.conn, Copy { source, position, is_complete: false, waits: None });
        }
    }

    /// A copy goes on over another connection. May block.
    pub fn resume(
        &self,
        ticket: Ticket,
        folder: &Path,
        position: Position,
        crc: u32,
        state: u64,
    ) -> Result<CopyReply, StateError> {
        let Position { journal, offset } = position;
        let is_written = self.known().ends.get(&journal).is_some_and(|end| offset <= *end);
        let source = if is_written { Source::resume(folder, (journal, offset), TAIL, crc)? } else { None };
        let head = if source.is_some() { StateReply::Nothing } else { StateReply::Gone { state } };
        source.into_iter().for_each(|source| self.add(ticket, source, position));
        Ok(CopyReply { ticket, head, payload: None })
    }

    /// What another process asks for. None: later. May block.
    pub fn read(&self, ticket: Ticket, request: &StateRequest<'_>) -> Result<Option<CopyReply>, StateError> {
        let gone = Ok(Some(CopyReply { ticket, head: StateReply::Gone { state: 0 }, payload: None }));
        let Some(source) = self.known().copies.get(&ticket.conn).map(|copy| copy.source.clone()) else { return gone };
        let mut source = source.lock().unwrap_or_else(PoisonError::into_inner);
        match *request {
            StateRequest::Variable { id, offset } => {
                let piece = source.read_variable(id, offset)?;
                Ok(Some(CopyReply::piece(ticket, piece, 0)))
            }
            StateRequest::Journal(position) => {
                let end = match self.wait(ticket, position) {
                    Wait::Reads(end) => end,
                    Wait::Ends(head) => return Ok(Some(CopyReply { ticket, head, payload: None })),
                    Wait::Waits => return Ok(None),
                };
                let Some(piece) = source.read_journal(position.journal, position.offset, end)? else { return gone };
                let more = self.known().left(position).saturating_sub(piece.len() as u64);
                Ok(Some(CopyReply::piece(ticket, piece, more)))
            }
            _ => gone,
        }
    }

    /// What follows in a journal. If nothing does, the copy waits.
    fn wait(&self, ticket: Ticket, position: Position) -> Wait {
        let mut known = self.known();
        match known.ends.get(&position.journal) {
            None => return Wait::Ends(StateReply::Gone { state: 0 }),
            Some(end) if position.offset < *end => return Wait::Reads(*end),
            Some(_) if known.newest().journal > position.journal => return Wait::Ends(StateReply::Next),
            Some(_) if known.offers => return Wait::Ends(StateReply::Offered),
            Some(_) => {}
        }
        let Known { copies, wants_journal, .. } = &mut *known;
        if let Some(copy) = copies.get_mut(&ticket.conn) {
            copy.waits = Some((ticket, Instant::now()));
            *wants_journal |= !std::mem::replace(&mut copy.is_complete, true);
        }
        Wait::Waits
    }

    /// A copy has everything before this. Returns the number of a flush that all copies have now.
    pub fn has(&self, conn: u64, position: Position) -> Option<u64> {
        let mut known = self.known();
        known.copies.get_mut(&conn)?.position = position;
        known.confirmed()
    }

    /// A flush was written. Returns whether copies have to confirm it.
    pub fn flushed(&self, journals: impl Iterator<Item = (u64, u64)>, number: u64) -> bool {
        let mut known = self.known();
        known.ends.extend(journals);
        if !known.copies.values().any(|copy| copy.is_complete) {
            return false;
        }
        let newest = known.newest();
        // One that has written nothing.
        known.unconfirmed.pop_back().filter(|last| last.0 != newest).into_iter().for_each(|last| {
            known.unconfirmed.push_back(last);
        });
        known.unconfirmed.push_back((newest, number));
        known.confirmed() != Some(number)
    }

    /// A connection is closed. Returns the number of a flush that all copies have that are left, and whether the copy
    /// of this connection was complete.
    pub fn gone(&self, conn: u64) -> Option<(Option<u64>, bool)> {
        let mut known = self.known();
        known.open.remove(&conn);
        match &mut known.take_over {
            TakeOver::Asked { ticket, .. } if ticket.conn == conn => known.take_over = TakeOver::No,
            // It is given up at once.
            TakeOver::Prepared { conn: own, until, .. } if *own == conn => *until = Instant::now(),
            _ => {}
        }
        let copy = known.copies.remove(&conn)?;
        Some((known.confirmed(), copy.is_complete))
    }

    /// The requests to answer now, each with where it goes on, and whether there is anything for it. Without news,
    /// those that have waited for a while.
    pub fn due(&self, now: Instant) -> Vec<(Ticket, Position, bool)> {
        let mut known = self.known();
        let (newest, offers) = (known.newest(), known.offers);
        let mut due = Vec::new();
        for copy in known.copies.values_mut() {
            let has_news = copy.position != newest || offers;
            if let Some((ticket, _)) = copy.waits.take_if(|(_, since)| has_news || *since + HEARTBEAT <= now) {
                due.push((ticket, copy.position, has_news));
            }
        }
        due
    }

    /// Whether a copy has become complete since the last time.
    pub fn wants_journal(&self) -> bool {
        std::mem::take(&mut self.known().wants_journal)
    }

    /// Whether the process that has taken over is still connected.
    pub fn is_any(&self) -> bool {
        !self.known().copies.is_empty()
    }

    /// The number of complete copies.
    pub fn count(&self) -> usize {
        self.known().copies.values().filter(|copy| copy.is_complete).count()
    }

    /// The owner stops. Returns whether somebody could take over.
    pub fn offer(&self) -> bool {
        let mut known = self.known();
        known.offers = known.copies.values().any(|copy| copy.is_complete);
        known.offers
    }

    pub fn take_over(&self) -> TakeOver {
        self.known().take_over.clone()
    }

    /// Another process wants the state, and will be at this address.
    pub fn ask(&self, ticket: Ticket, address: &str) -> Result<Option<CopyReply>, StarFailure> {
        let mut known = self.known();
        match &mut known.take_over {
            TakeOver::Asked { ticket: asked, address: to } if to == address => {
                *asked = ticket;
                Ok(None)
            }
            TakeOver::No => {
                known.take_over = TakeOver::Asked { ticket, address: address.to_owned() };
                Ok(None)
            }
            TakeOver::Prepared { position, address: to, .. } | TakeOver::Done { position, address: to }
                if to == address =>
            {
                Ok(Some(CopyReply { ticket, head: StateReply::Prepared(*position), payload: None }))
            }
            TakeOver::Asked { address, .. } | TakeOver::Prepared { address, .. } | TakeOver::Done { address, .. } => {
                let message = format!("starwire: the state already goes to {address}");
                Err(StarFailure::new(code::FAILED_PRECONDITION, message))
            }
        }
    }

    /// No change follows. Returns the reply to whoever has asked.
    pub fn prepared(&self, now: Instant) -> Option<CopyReply> {
        let mut known = self.known();
        let TakeOver::Asked { ticket, address } = known.take_over.clone() else { return None };
        let position = known.newest();
        known.take_over = TakeOver::Prepared { conn: ticket.conn, position, address, until: now + PATIENCE };
        Some(CopyReply { ticket, head: StateReply::Prepared(position), payload: None })
    }

    /// The take-over is not going to happen, unless that is too late. Returns whether it is not, and who has asked, if
    /// it was not answered yet.
    pub fn give_up(&self) -> (bool, Option<Ticket>) {
        let mut known = self.known();
        match &known.take_over {
            TakeOver::Done { .. } => return (false, None),
            TakeOver::Asked { ticket, .. } => {
                let asked = Some(*ticket);
                known.take_over = TakeOver::No;
                return (true, asked);
            }
            TakeOver::No | TakeOver::Prepared { .. } => {}
        }
        known.take_over = TakeOver::No;
        (true, None)
    }

    /// The process `by` has everything: hands over, unless that was done before. Returns where it is. The owner's
    /// thread cannot flush meanwhile: it would have to give the take-over up, for which it needs this lock.
    pub fn confirm(
        &self,
        has: Position,
        by: &str,
        hand_over: impl FnOnce(&str) -> Result<(), StateError>,
    ) -> Result<String, StarFailure> {
        let mut known = self.known();
        let (address, is_new) = match &known.take_over {
            TakeOver::Prepared { position, address, .. } if *position == has && address == by => (by.to_owned(), true),
            TakeOver::Done { position, address } if *position == has && address == by => (by.to_owned(), false),
            _ => {
                let message = format!("starwire: {GIVEN_UP}, because the other process was not heard of");
                return Err(StarFailure::new(code::ABORTED, message));
            }
        };
        if is_new {
            hand_over(&address).map_err(|error| StarFailure::new(code::INTERNAL, format!("starwire: {error}")))?;
            known.take_over = TakeOver::Done { position: has, address: address.clone() };
        }
        Ok(address)
    }
}

impl CopyReply {
    fn piece(ticket: Ticket, piece: Vec<u8>, more: u64) -> Self {
        let head = StateReply::Piece { crc: checksum(&piece), more };
        Self { ticket, head, payload: Some(OutPayload::of(vec![piece])) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::testing::TempDir;
    use starwire_state::{Definition, Store};

    const NEW: &str = "there:1";

    fn ticket(conn: u64) -> Ticket {
        Ticket { conn, id: 1 }
    }

    fn journal((journal, offset): (u64, u64)) -> StateRequest<'static> {
        StateRequest::Journal(Position { journal, offset })
    }

    /// An owner with one flush.
    fn owner(folder: &TempDir) -> (Store, Copies) {
        let mut store = Store::open(folder.path(), "task", &[1]).unwrap();
        let copies = Copies::default();
        flush(&mut store, &copies, 1);
        (store, copies)
    }

    /// Returns whether copies have to confirm it.
    fn flush(store: &mut Store, copies: &Copies, number: u64) -> bool {
        let mut flush = store.begin().unwrap();
        let id = flush.variable(Definition { bytes: Vec::new(), dims: vec![2], rows: 2, row_bytes: 4 });
        flush.rows(id, 0, &[7; 8]);
        flush.commit(b"").unwrap();
        copies.flushed(store.journals(), number)
    }

    fn newest(store: &Store) -> (u64, u64) {
        store.journals().last().unwrap()
    }

    fn head(reply: Option<CopyReply>) -> Option<StateReply> {
        reply.map(|reply| reply.head)
    }

    /// A copy that has everything, and waits.
    fn complete(copies: &Copies, folder: &TempDir, store: &Store, conn: u64) {
        copies.asks(conn);
        let begun = copies.begin(ticket(conn), folder.path(), 7).unwrap();
        assert_eq!(begun.head, StateReply::Begun { journal: 1, state: 7 });
        let (number, end) = newest(store);
        let piece = head(copies.read(ticket(conn), &journal((number, 0))).unwrap());
        assert!(matches!(piece, Some(StateReply::Piece { more: 0, .. })), "{piece:?}");
        copies.has(conn, Position { journal: number, offset: end });
        assert_eq!(head(copies.read(ticket(conn), &journal((number, end))).unwrap()), None, "it waits");
    }

    #[test]
    fn a_copy_that_waits_hears_of_what_was_written_or_that_nothing_was() {
        let folder = TempDir::new("copies");
        let (mut store, copies) = owner(&folder);
        let now = Instant::now();
        assert_eq!(
            head(copies.read(ticket(1), &journal((1, 0))).unwrap()),
            Some(StateReply::Gone { state: 0 }),
            "it never began"
        );
        complete(&copies, &folder, &store, 1);
        assert_eq!(copies.count(), 1);
        assert!(copies.due(now).is_empty());
        let (journal, offset) = newest(&store);
        let position = Position { journal, offset };
        assert_eq!(copies.due(now + HEARTBEAT * 2), [(ticket(1), position, false)]);
        copies.read(ticket(1), &self::journal((journal, offset))).unwrap();
        assert!(flush(&mut store, &copies, 2));
        assert_eq!(copies.due(now), [(ticket(1), position, true)]);
        assert!(copies.due(now).is_empty(), "it was answered");
        assert_eq!(copies.gone(1), Some((Some(2), true)), "nobody is left who would have to confirm it");
        assert!(!flush(&mut store, &copies, 3) && copies.gone(1).is_none());
    }

    #[test]
    fn a_flush_is_confirmed_when_all_complete_copies_have_it() {
        let folder = TempDir::new("copies");
        let (mut store, copies) = owner(&folder);
        complete(&copies, &folder, &store, 1);
        complete(&copies, &folder, &store, 2);
        // One that is not complete holds nobody up.
        copies.asks(3);
        copies.begin(ticket(3), folder.path(), 7).unwrap();
        let before = newest(&store);
        assert!(flush(&mut store, &copies, 2));
        let middle = newest(&store);
        assert!(flush(&mut store, &copies, 3));
        let has = |conn, (journal, offset)| copies.has(conn, Position { journal, offset });
        assert_eq!(has(1, newest(&store)), None);
        assert_eq!(has(2, before), None);
        assert_eq!(has(2, middle), Some(2));
        assert_eq!(copies.gone(2), Some((Some(3), true)));
        // Nothing new was written, and all have everything.
        assert!(!copies.flushed(store.journals(), 4));
        assert_eq!(has(1, newest(&store)), None);
    }

    #[test]
    fn a_copy_that_begins_when_its_connection_is_closed_keeps_nothing() {
        let folder = TempDir::new("copies");
        let (_store, copies) = owner(&folder);
        copies.asks(1);
        assert!(copies.gone(1).is_none());
        let begun = copies.begin(ticket(1), folder.path(), 7).unwrap();
        assert_eq!(begun.head, StateReply::Begun { journal: 1, state: 7 });
        // As long as somebody reads, no journal is merged.
        assert!(!copies.is_any());
    }

    #[test]
    fn another_connection_goes_on_with_the_same_copy_only() {
        let folder = TempDir::new("copies");
        let (store, copies) = owner(&folder);
        let (journal, offset) = newest(&store);
        let position = Position { journal, offset };
        let path = folder.path().join(format!("journal-{journal}"));
        let content = std::fs::read(path).unwrap();
        let crc = checksum(&content[..usize::try_from(offset).unwrap()]);
        copies.asks(5);
        let resume = |position, crc| copies.resume(ticket(5), folder.path(), position, crc, 7).unwrap().head;
        assert_eq!(resume(position, crc ^ 1), StateReply::Gone { state: 7 });
        assert_eq!(resume(Position { journal: journal + 1, offset }, crc), StateReply::Gone { state: 7 });
        assert_eq!(resume(Position { offset: offset + 1, ..position }, crc), StateReply::Gone { state: 7 });
        assert_eq!(copies.count(), 0);
        assert_eq!(resume(position, crc), StateReply::Nothing);
        assert_eq!(head(copies.read(ticket(5), &self::journal((journal, offset))).unwrap()), None);
        assert_eq!(copies.count(), 1);
    }

    #[test]
    fn the_state_is_handed_over_once_and_only_to_who_has_all_of_it() {
        let folder = TempDir::new("copies");
        let (store, copies) = owner(&folder);
        let now = Instant::now();
        complete(&copies, &folder, &store, 1);
        let (journal, offset) = newest(&store);
        let position = Position { journal, offset };
        let given = std::cell::Cell::new(0);
        let confirm_by = |position, by| {
            copies.confirm(position, by, |to| {
                assert_eq!(to, NEW);
                given.set(given.get() + 1);
                Ok(())
            })
        };
        let confirm = |position| confirm_by(position, NEW);
        assert!(confirm(position).unwrap_err().message.contains(GIVEN_UP), "nobody has asked");
        assert!(copies.ask(ticket(1), NEW).unwrap().is_none());
        assert!(confirm(position).is_err(), "changes may follow");
        assert!(copies.ask(ticket(1), NEW).unwrap().is_none(), "over another connection");
        assert!(copies.ask(ticket(2), "elsewhere:1").is_err_and(|error| error.message.contains("already goes to")));
        assert_eq!(head(copies.prepared(now)), Some(StateReply::Prepared(position)));
        assert_eq!(head(copies.prepared(now)), None, "it was said");
        assert!(confirm(Position { offset: offset - 1, ..position }).is_err(), "the last change is missing");
        assert!(confirm_by(position, "elsewhere:1").is_err(), "it has the same, and was given up");
        assert_eq!(head(copies.ask(ticket(4), NEW).unwrap()), Some(StateReply::Prepared(position)), "over another one");
        assert_eq!(confirm(position).unwrap(), NEW);
        assert_eq!(confirm(position).unwrap(), NEW, "the answer was lost");
        assert!(confirm_by(position, "elsewhere:1").is_err(), "it was given up long ago");
        assert_eq!(given.get(), 1);
        assert_eq!(copies.give_up(), (false, None), "that is too late");
        assert_eq!(copies.take_over(), TakeOver::Done { position, address: NEW.into() });
    }

    #[test]
    fn a_take_over_ends_with_its_connection() {
        let folder = TempDir::new("copies");
        let (store, copies) = owner(&folder);
        complete(&copies, &folder, &store, 1);
        copies.ask(ticket(1), NEW).unwrap();
        copies.gone(1);
        assert_eq!(copies.take_over(), TakeOver::No);
        complete(&copies, &folder, &store, 2);
        copies.ask(ticket(2), NEW).unwrap();
        copies.prepared(Instant::now()).unwrap();
        copies.gone(2);
        let TakeOver::Prepared { until, .. } = copies.take_over() else { panic!("it waits for the thread") };
        assert!(until <= Instant::now());
        assert_eq!(copies.give_up(), (true, None), "it was answered");
        assert_eq!(copies.take_over(), TakeOver::No);
    }

    #[test]
    fn a_take_over_that_is_not_confirmed_in_time_is_given_up() {
        let folder = TempDir::new("copies");
        let (store, copies) = owner(&folder);
        let now = Instant::now();
        complete(&copies, &folder, &store, 1);
        copies.ask(ticket(1), NEW).unwrap();
        copies.prepared(now - PATIENCE).unwrap();
        let TakeOver::Prepared { position, until, .. } = copies.take_over() else { panic!("it waits for the thread") };
        assert_eq!((until, PATIENCE), (now, Duration::from_secs(10)));
        assert_eq!(copies.give_up(), (true, None), "it was answered");
        assert_eq!(copies.take_over(), TakeOver::No);
        let refused = copies.confirm(position, NEW, |_| panic!("this is the owner")).unwrap_err();
        assert!(refused.code == code::ABORTED && refused.message.contains(GIVEN_UP), "{}", refused.message);
    }

    #[test]
    fn a_server_that_stops_offers_its_state_to_a_copy_that_has_all_of_it() {
        let folder = TempDir::new("copies");
        let (store, copies) = owner(&folder);
        copies.asks(1);
        copies.begin(ticket(1), folder.path(), 7).unwrap();
        assert!(!copies.offer());
        complete(&copies, &folder, &store, 1);
        assert!(copies.offer());
        let due = copies.due(Instant::now());
        let [(_, Position { journal, offset }, true)] = due[..] else { panic!("{due:?}") };
        assert_eq!(head(copies.read(ticket(1), &self::journal((journal, offset))).unwrap()), Some(StateReply::Offered));
    }
}
