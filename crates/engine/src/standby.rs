//! A process that takes over the state of another process of its task, before it begins to serve.
//!
//! It copies the state piece by piece, and follows what is written to it. It asks for the state once the copy is
//! complete, or when the owner stops; or it takes what it has, if somebody says that the owner has ended
//! (`starctl state promote`). Nothing else makes it an owner: that the other process does not answer proves nothing.

use std::cell::RefCell;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::api::{Buffers, Host, IncomingCall, Level, Op, PendingOp, RecvRequest};
use crate::channel::Channel;
use crate::command::NewCall;
use crate::config::{Config, Env, HostPort, Identity, TakeOver, is_loopback, is_unspecified};
use crate::engine::Engine;
use crate::error::EngineError;
use crate::star::{folder_of, owner_of};
use crate::system::random;
use starwire_marks::fail_point;
use starwire_protocol::state::{Position, STATE, StateReply, StateRequest, TAIL, checksum};
use starwire_protocol::{Failure, Outcome, code};
use starwire_state::{Loaded, PIECE, Replica, StateError};

/// The owner answers each request within a second, if it lives.
const DEADLINE: Duration = Duration::from_secs(10);
/// The end of a take-over: calls that change something have to end, and the last changes are written.
const LONG_DEADLINE: Duration = Duration::from_secs(60);
/// If no new journal begins by then, there may be somebody who reads the owner's folder.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(500);
/// How often the log repeats that there is no connection.
const REMINDER: Duration = Duration::from_secs(60);

type Log = Arc<dyn Fn(Level, &str) + Send + Sync>;

/// If STARWIRE_STATE_FROM says so: returns once this process has the state of the other one. The address of this
/// process is that of the identity.
pub fn take_over(env: &dyn Env, identity: Identity, log: Log) -> Result<(), EngineError> {
    let mut config = Config::from_env(env, identity)?;
    // The server says them when it starts.
    config.warnings.clear();
    let Some(state) = config.state.take() else { return Ok(()) };
    let Some(from) = state.from else { return Ok(()) };
    let (identity, origin) = (config.identity.clone(), from.address.to_string());
    let (folder, owner) = (folder_of(&state.folder, &identity), owner_of(&config.cluster_id, &identity));
    if Replica::has_taken_over(&folder, &origin)? {
        return Ok(());
    }
    let own = config.data_address(&identity.task, &identity.grpc_address)?.address().clone();
    let lacks = match (&own, &from.address) {
        (HostPort { port: 0, .. }, _) => Some("port"),
        (HostPort { host, .. }, _) if is_unspecified(host) => Some("host"),
        (HostPort { host: own, .. }, HostPort { host, .. }) if is_loopback(own) && !is_loopback(host) => Some("host"),
        _ => None,
    };
    if let Some(lacks) = lacks {
        let line =
            format!("{own}, this server's address in the ClusterSpec, has no {lacks} that workers could be sent to");
        return Err(EngineError::TakeOver(line));
    }
    let own = own.to_string();
    if own == origin || identity.grpc_address == origin {
        return Err(EngineError::TakeOver(format!("{origin} is this server's own address")));
    }
    let [a, b, c, d, e, f, g, h, ..] = random::bytes();
    let engine = Engine::start_client(config, u64::from_ne_bytes([a, b, c, d, e, f, g, h]), Caller(log.clone()))?;
    let channel = engine.channel(&identity.task, &origin)?;
    let standby = Standby {
        channel,
        folder,
        owner,
        own,
        origin,
        when: from.when,
        task: identity.task,
        log,
        loading: RefCell::default(),
    };
    let taken = standby.run();
    engine.stop();
    Ok(taken?)
}

struct Standby {
    channel: Channel<Caller>,
    folder: PathBuf,
    owner: String,
    own: String,
    origin: String,
    when: TakeOver,
    task: String,
    log: Log,
    /// Reads the copy that is about to take over.
    loading: RefCell<Option<JoinHandle<Option<Loaded>>>>,
}

/// Why the copy does not go on.
enum Stop {
    /// There was no answer: it goes on soon.
    Again(String),
    /// The owner answers with an error, so it is there: the copy goes on soon.
    Refused(String),
    /// It begins anew.
    Gone,
    Error(StateError),
}

impl From<StateError> for Stop {
    fn from(error: StateError) -> Self {
        Self::Error(error)
    }
}

impl Standby {
    fn run(&self) -> Result<(), StateError> {
        let Self { task, origin, folder, log, .. } = self;
        log(Level::Info, &format!("starwire: {task} copies the state of {origin} to {}", folder.display()));
        let mut said: Option<Instant> = None;
        let mut begins_anew = false;
        loop {
            if Replica::has_taken_over(folder, origin)? {
                log(Level::Info, &format!("starwire: {task} has the state of {origin}: it was promoted"));
                return Ok(());
            }
            // A complete copy, of another process or of this one, stays until there is another one.
            let found = if begins_anew { None } else { Replica::reopen(folder, &self.owner)? };
            self.loading.take();
            let copied = found.map_or_else(|| self.copy(), |replica| self.go_on(replica));
            begins_anew = matches!(copied, Err(Stop::Gone));
            match copied {
                Ok((replica, why)) => {
                    replica.take_over(origin)?;
                    let loaded = self.loading.take().and_then(|thread| thread.join().ok().flatten());
                    loaded.into_iter().for_each(|loaded| loaded.wait(folder));
                    log(Level::Info, &format!("starwire: {task} has the state of {origin}: {why}"));
                    return Ok(());
                }
                Err(Stop::Error(error)) => return Err(error),
                Err(Stop::Gone) => {}
                Err(Stop::Again(why) | Stop::Refused(why)) => {
                    if said.is_none_or(|at| at.elapsed() >= REMINDER) {
                        said = Some(Instant::now());
                        let line = format!("starwire: {task} has no copy of the state of {origin} now: {why}");
                        log(Level::Warning, &line);
                    }
                }
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Follows the owner with a complete copy, until this process may take over.
    fn go_on(&self, mut replica: Replica) -> Result<(Replica, &'static str), Stop> {
        let why = match self.alone(&mut replica)? {
            true => "it was promoted",
            false => {
                let position = position_of(&replica);
                self.follow(&mut replica, position, None)?
            }
        };
        Ok((replica, why))
    }

    /// Copies the state until this process may take over. Returns why it may.
    fn copy(&self) -> Result<(Replica, &'static str), Stop> {
        let begun = Instant::now();
        let (head, list) = self.ask(&StateRequest::Begin, LONG_DEADLINE)?;
        let StateReply::Begun { journal, state } = head else { return Err(self.unexpected(head)) };
        let Self { task, origin, folder, log, .. } = self;
        match Replica::complete_copy(folder)? {
            None => {}
            Some(own) if own == state => {
                let line = format!("starwire: {task} lacks what {origin} no longer has, and begins its copy anew");
                log(Level::Info, &line);
            }
            // What this process has may be all that is left. The owner's files are not read.
            Some(_) => {
                self.ask(&StateRequest::Journal(Position { journal, offset: 0 }), DEADLINE)?;
                return Err(Stop::Refused(self.another_state()));
            }
        }
        let mut replica = Replica::begin(&self.folder, &self.owner)?;
        fail_point!("a copy begins, and has nothing yet");
        let mut bytes = 0;
        for file in list.chunks_exact(16) {
            let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| file[at + i]));
            let id = u32::try_from(number(0)).map_err(|_| Stop::Again("a variable has a wrong number".to_owned()))?;
            self.copy_variable(&replica, id, number(8))?;
            bytes += number(8);
        }
        let why = self.follow(&mut replica, Position { journal, offset: 0 }, Some((bytes, begun)))?;
        Ok((replica, why))
    }

    /// Copies what is written, until this process may take over. `begins`: the copy is not complete yet.
    fn follow(
        &self,
        replica: &mut Replica,
        mut position: Position,
        mut begins: Option<(u64, Instant)>,
    ) -> Result<&'static str, Stop> {
        // Once it is complete, the owner begins a new journal, and this process merges the one before.
        let mut merges_until: Option<Instant> = None;
        let mut has_resumed = false;
        loop {
            let is_complete = begins.is_none();
            let (head, piece) = match self.ask(&StateRequest::Journal(position), DEADLINE) {
                // The owner knows a copy by its connection: this may be another one.
                Err(Stop::Again(_) | Stop::Refused(_)) | Ok((StateReply::Gone { .. }, _))
                    if is_complete && !has_resumed =>
                {
                    if self.alone(replica)? {
                        return Ok("it was promoted");
                    }
                    position = position_of(replica);
                    has_resumed = true;
                    continue;
                }
                // Whether that is so, the next connection will tell.
                Ok((StateReply::Gone { .. }, _)) if is_complete => {
                    return Err(Stop::Again(format!("{} does not know this copy", self.origin)));
                }
                other => other?,
            };
            has_resumed = false;
            let has_all = match head {
                StateReply::Piece { more, .. } => {
                    replica.write_journal(position.journal, &piece)?;
                    position.offset += piece.len() as u64;
                    begins.iter_mut().for_each(|(bytes, _)| *bytes += piece.len() as u64);
                    // What this process asks for next says that this is on its disk.
                    if more == 0 || is_complete {
                        replica.sync()?;
                    }
                    if more == 0 {
                        if let Some((bytes, since)) = begins.take() {
                            replica.complete()?;
                            fail_point!("a copy is complete, and follows");
                            self.say_complete(bytes, since);
                            merges_until = Some(Instant::now() + PATIENCE);
                        }
                    }
                    more == 0
                }
                StateReply::Next => {
                    position = Position { journal: position.journal + 1, offset: 0 };
                    merges_until = merges_until.map(|_| Instant::now());
                    continue;
                }
                StateReply::Nothing => true,
                StateReply::Offered => return self.hand_over(replica, position),
                _ => return Err(self.unexpected(head)),
            };
            if is_complete && merges_until.is_some_and(|until| until <= Instant::now()) {
                // It takes time, in which nobody should wait.
                merges_until = None;
                replica.prepare()?;
            } else if has_all
                && is_complete
                && merges_until.is_none()
                && self.when == TakeOver::Now
                && self.has_loaded(replica)
            {
                return self.hand_over(replica, position);
            }
            if is_complete {
                self.stays(replica)?;
            }
        }
    }

    /// Reads the copy into memory, while it follows. True: that has ended, or cannot be done.
    fn has_loaded(&self, replica: &Replica) -> bool {
        let mut loading = self.loading.borrow_mut();
        if let Some(thread) = &*loading {
            return thread.is_finished();
        }
        let Some(journal) = replica.only_journal() else { return true };
        let folder = self.folder.clone();
        // Whatever is wrong with a file is said when the state is opened.
        let read = move || Loaded::read(&folder, journal).ok().flatten();
        *loading = std::thread::Builder::new().name("starwire-load".into()).spawn(read).ok();
        loading.is_none()
    }

    /// The owner answers: whoever has promoted the copy was wrong.
    fn stays(&self, replica: &Replica) -> Result<(), StateError> {
        if replica.is_promoted() {
            replica.stay()?;
            let Self { task, origin, log, .. } = self;
            let line = format!("starwire: {task} was promoted, but stays a standby: {origin} answers");
            log(Level::Warning, &line);
        }
        Ok(())
    }

    fn copy_variable(&self, replica: &Replica, id: u32, bytes: u64) -> Result<(), Stop> {
        let mut offset = 0;
        loop {
            let (head, piece) = self.ask(&StateRequest::Variable { id, offset }, DEADLINE)?;
            if !matches!(head, StateReply::Piece { .. }) {
                return Err(self.unexpected(head));
            }
            replica.write_variable(id, offset, &piece)?;
            fail_point!("part of a variable is copied");
            offset += piece.len() as u64;
            if offset >= bytes {
                return Ok(());
            }
            if piece.is_empty() {
                return Err(Stop::Again(format!("variable {id} has {offset} bytes instead of {bytes}")));
            }
        }
    }

    fn say_complete(&self, bytes: u64, begun: Instant) {
        let Self { task, origin, log, .. } = self;
        let seconds = begun.elapsed().as_secs_f64();
        let line = format!("starwire: {task} has a copy of the state of {origin}: {bytes} bytes in {seconds:.1} s");
        log(Level::Info, &line);
    }

    /// The owner writes what is left, gives the state away, and this process has it.
    fn hand_over(&self, replica: &mut Replica, mut position: Position) -> Result<&'static str, Stop> {
        replica.prepare()?;
        let (head, _) = self.ask(&StateRequest::TakeOver { address: &self.own }, LONG_DEADLINE)?;
        let StateReply::Prepared(end) = head else { return Err(self.unexpected(head)) };
        while position != end {
            let (head, piece) = self.ask(&StateRequest::Journal(position), DEADLINE)?;
            match head {
                StateReply::Piece { .. } => {
                    replica.write_journal(position.journal, &piece)?;
                    position.offset += piece.len() as u64;
                }
                StateReply::Next => position = Position { journal: position.journal + 1, offset: 0 },
                // The copy is complete: it goes on over another connection.
                StateReply::Gone { .. } => {
                    return Err(Stop::Refused(format!("{} does not know this copy", self.origin)));
                }
                _ => return Err(self.unexpected(head)),
            }
        }
        replica.prepare()?;
        // If the answer is lost, nobody but the owner knows whether it has given the state away.
        let mut is_said = false;
        loop {
            match self.ask(&StateRequest::Confirm { position: end, address: &self.own }, DEADLINE) {
                Ok((StateReply::Yours, _)) => {
                    fail_point!("the state is this process's, and its folder does not say so");
                    return Ok("it was handed over");
                }
                Ok((head, _)) => return Err(self.unexpected(head)),
                Err(Stop::Again(why)) if !std::mem::replace(&mut is_said, true) => self.say_alone(&why),
                Err(Stop::Again(_)) => std::thread::sleep(PAUSE),
                Err(error) => return Err(error),
            }
            if replica.is_promoted() {
                return Ok("it was promoted");
            }
        }
    }

    fn say_alone(&self, why: &str) {
        let Self { task, origin, folder, log, .. } = self;
        let line = format!(
            "starwire: {task} has lost the owner of the state, {origin}: {why}. It takes over if that has ended for good: starctl state promote {}",
            folder.display()
        );
        log(Level::Warning, &line);
    }

    /// The copy is complete, and its owner does not answer as it should: waits until it does, or until it cannot be
    /// reached and somebody has said that it has ended; then it returns true.
    fn alone(&self, replica: &mut Replica) -> Result<bool, Stop> {
        let (mut is_said, mut is_another) = (false, false);
        loop {
            let resume = StateRequest::Resume { position: position_of(replica), crc: replica.tail_crc(TAIL)? };
            let why = match self.ask(&resume, DEADLINE) {
                Ok((StateReply::Nothing, _)) => {
                    self.stays(replica)?;
                    if is_said {
                        let Self { task, origin, log, .. } = self;
                        log(Level::Info, &format!("starwire: {task} follows {origin} again"));
                    }
                    return Ok(false);
                }
                Ok((StateReply::Gone { state }, _)) if self.is_another_state(state)? => {
                    self.stays(replica)?;
                    let why = self.another_state();
                    if !std::mem::replace(&mut is_another, true) {
                        let Self { task, origin, log, .. } = self;
                        let line = format!("starwire: {task} has no copy of the state of {origin} now: {why}");
                        log(Level::Warning, &line);
                    }
                    why
                }
                Ok((head, _)) => return Err(self.unexpected(head)),
                Err(Stop::Again(_)) if replica.is_promoted() => {
                    replica.prepare()?;
                    return Ok(true);
                }
                Err(Stop::Again(why)) => why,
                Err(Stop::Refused(why)) => {
                    self.stays(replica)?;
                    why
                }
                Err(error) => return Err(error),
            };
            if !std::mem::replace(&mut is_said, true) {
                self.say_alone(&why);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Whether the owner has begun a state without what is in this complete copy.
    fn is_another_state(&self, state: u64) -> Result<bool, StateError> {
        Ok(state != 0 && Replica::complete_copy(&self.folder)?.is_some_and(|own| own != state))
    }

    fn another_state(&self) -> String {
        let Self { origin, folder, .. } = self;
        format!(
            "{origin} has begun another one, of which {} is no copy: end that server and promote this copy, or remove the folder",
            folder.display()
        )
    }

    fn unexpected(&self, head: StateReply) -> Stop {
        match head {
            StateReply::Gone { .. } => Stop::Gone,
            // The owner changes its files.
            _ => Stop::Again(format!("{} has answered with {head:?}", self.origin)),
        }
    }

    /// Waits for the answer.
    fn ask(&self, request: &StateRequest<'_>, deadline: Duration) -> Result<(StateReply, Vec<u8>), Stop> {
        let (tell, told) = mpsc::sync_channel(1);
        self.channel.call(NewCall {
            method: STATE.into(),
            meta: request.write(),
            payload: None,
            deadline_ms: u32::try_from(deadline.as_millis()).unwrap_or(u32::MAX),
            wait_for_ready: false,
            deadline_to_connect: false,
            op: PendingOp::new(Asked(tell)),
        });
        let (meta, piece) = answer(&told)?;
        let head = StateReply::read(&meta).map_err(|error| Stop::Again(error.to_string()))?;
        match head {
            StateReply::Piece { crc, .. } if crc != checksum(&piece) => {
                Err(Stop::Again("a piece was changed on its way: its checksum is wrong".to_owned()))
            }
            _ => Ok((head, piece)),
        }
    }
}

type Answer = Result<(Vec<u8>, Vec<u8>), Stop>;

/// An engine that stops ends all calls.
fn answer(told: &Receiver<Answer>) -> Answer {
    told.recv().unwrap_or_else(|_| Err(Stop::Again("the call was dropped".to_owned())))
}

fn position_of(replica: &Replica) -> Position {
    let (journal, offset) = replica.position();
    Position { journal, offset }
}

/// A request of this process.
struct Asked(SyncSender<Answer>);

impl Op for Asked {
    fn alloc(&mut self, _meta: &[u8], lens: &[u64]) -> Result<Buffers, Failure> {
        match lens {
            // A list of variables is shorter.
            [len] if *len <= PIECE.max(1 << 24) => {
                Ok(Buffers::owned(vec![vec![0; usize::try_from(*len).unwrap_or_default()]]))
            }
            _ => Err(Failure { code: code::INTERNAL, message: format!("a piece of the state has {lens:?} bytes") }),
        }
    }

    fn done(self, outcome: &Outcome<'_>, buffers: Buffers) {
        let answer = match outcome {
            Outcome::Ok { meta } => Ok((meta.to_vec(), buffers.into_owned().pop().unwrap_or_default())),
            Outcome::PeerError { message, .. } => Err(Stop::Refused((*message).to_owned())),
            Outcome::Local { message, .. } | Outcome::Lost { message, .. } => Err(Stop::Again((*message).to_owned())),
        };
        let _ = self.0.send(answer);
    }
}

/// Answers nobody.
struct Caller(Log);

impl Host for Caller {
    type Key = ();
    type Op = Asked;
    type Star = Infallible;

    fn key(&self, _prefix: &[u8]) -> Option<()> {
        None
    }
    fn key_gone(&self, (): ()) {}
    fn recv(&self, _requests: &[RecvRequest<()>]) {}
    fn takes_calls(&self) -> bool {
        false
    }
    fn call(&self, _call: IncomingCall) {}
    fn log(&self, level: Level, line: &str) {
        (self.0)(level, line);
    }
}
