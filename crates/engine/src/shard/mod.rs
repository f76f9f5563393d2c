//! A reactor thread: its loop around [`Links`] (I/O) and two machines without I/O, [`Peers`] and [`Admission`].

mod events;
mod requests;
mod wait;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::admission::{Admission, Listener};
use crate::api::Host;
use crate::command::{Command, Request};
use crate::links::{Links, Services};
use crate::peers::Peers;
use crate::resolver::{LookUpName, look_up_in_thread};
use crate::shared::{self, LocalQueue, Shared};
use starwire_net::reactor::driver::Driver;
use starwire_net::reactor::mailbox::Receiver;
use starwire_protocol::code;
use wait::Waiter;

/// Most commands between two looks at the sockets.
const COMMANDS_PER_ROUND: usize = 4096;
/// How long a stopping reactor waits for the kernel to release its memory.
const STOP_PATIENCE: Duration = Duration::from_secs(2);
/// A frozen reactor looks this often whether all others are.
const FREEZE_INTERVAL: Duration = Duration::from_millis(1);

pub struct Shard<H: Host> {
    index: usize,
    shared: Arc<Shared<H>>,
    mailbox: Receiver<Command<H>>,
    /// From the mailbox, before all that is still there.
    passed: VecDeque<Command<H>>,
    links: Links<H>,
    peers: Peers<Request<H::Op>>,
    admission: Admission,
    /// When handshakes that wait may go on.
    handshakes_at: Option<Instant>,
    waiter: Waiter,
    queue: LocalQueue<H>,
    local: Vec<Command<H>>,
    stopping: Option<Instant>,
    look_up_name: LookUpName<H>,
    /// While this reactor may make callbacks.
    callbacks: Option<Arc<()>>,
    /// Until it has said GOODBYE.
    unfinished: Option<Arc<()>>,
}

impl<H: Host> Shard<H> {
    pub fn new(
        index: usize,
        shared: Arc<Shared<H>>,
        services: Services<H>,
        driver: Box<dyn Driver>,
        mailbox: Receiver<Command<H>>,
        admission: Admission,
    ) -> Self {
        Self {
            index,
            mailbox,
            passed: VecDeque::new(),
            links: Links::new(index, shared.clone(), services, driver),
            peers: Peers::default(),
            admission,
            handshakes_at: None,
            waiter: Waiter::new(shared.config.polling),
            queue: LocalQueue::enter(shared.number, index),
            local: Vec::new(),
            stopping: None,
            look_up_name: look_up_in_thread,
            callbacks: Some(shared.callbacks.clone()),
            unfinished: Some(shared.unfinished.clone()),
            shared,
        }
    }

    /// So many pieces fit into the longest list of a connection.
    #[cfg(test)]
    pub fn room(&self) -> usize {
        self.links.room()
    }

    /// Another name service.
    #[cfg(test)]
    pub fn set_names(&mut self, look_up_name: LookUpName<H>) {
        self.look_up_name = look_up_name;
    }

    /// Takes a listening socket.
    pub fn listen(&mut self, fd: OwnedFd, listener: Listener) -> std::io::Result<()> {
        self.links.listen(fd, listener)
    }

    /// The loop of the reactor.
    pub fn run(&mut self) {
        // The owner learns that this thread is a reactor before any other callback.
        self.shared.host.round_end();
        loop {
            let now = Instant::now();
            if self.is_finished(now) {
                return self.end();
            }
            if self.shared.frozen.load(Ordering::Acquire) {
                self.freeze();
            }
            self.work(now);
            self.wait(now);
            self.complete(Instant::now());
        }
    }

    /// After the loop.
    pub fn end(&mut self) {
        self.links.let_go(STOP_PATIENCE);
        self.close_mailbox();
    }

    /// One turn of the loop, in virtual time.
    #[cfg(test)]
    pub fn turn(&mut self, now: Instant) {
        self.work(now);
        self.wait(now);
        self.complete(now);
    }

    /// Carries out commands and what is due.
    fn work(&mut self, now: Instant) {
        self.links.set_now(now);
        self.take_commands(now);
        self.fire_timers(now);
        self.flush(now);
        self.links.end_round();
        // Requests made by this round's callbacks are sent with it.
        if !self.queue.is_empty() {
            self.take_local(now);
            self.flush(now);
            // One of them may have ended others. What these callbacks ask for is done before the reactor sleeps.
            self.links.end_round();
        }
    }

    /// Handles what ended in the wait.
    fn complete(&mut self, now: Instant) {
        self.links.set_now(now);
        let mut completions = self.links.take_completions();
        for completion in completions.drain(..) {
            self.links.complete(completion);
            self.take_events(now);
        }
        self.links.put_completions(completions);
        self.links.count_pairs();
    }

    /// After a panic: closes the mailbox and drops the rest, which ends it.
    pub fn abandon(&mut self) {
        self.links.let_go(STOP_PATIENCE);
        self.links.clear();
        self.peers.clear();
        self.close_mailbox();
    }

    pub fn is_finished(&self, now: Instant) -> bool {
        self.stopping.is_some_and(|until| self.links.is_empty() || now >= until)
    }

    /// The process is exiting: makes no callbacks and frees nothing, because memory that callbacks own may be gone. Nor
    /// does the thread end, whose thread-local variables have callbacks as well.
    fn freeze(&mut self) -> ! {
        self.callbacks = None;
        while !self.shared.leaving.load(Ordering::Acquire) {
            std::thread::sleep(FREEZE_INTERVAL);
        }
        self.links.freeze();
        self.mailbox.close();
        while let Some(command) = self.passed.pop_front().or_else(|| self.mailbox.pop()) {
            std::mem::forget(command);
        }
        self.unfinished = None;
        loop {
            std::thread::park();
        }
    }

    fn close_mailbox(&mut self) {
        self.mailbox.close();
        while let Some(command) = self.passed.pop_front().or_else(|| self.mailbox.pop()) {
            shared::end(command, code::UNAVAILABLE, "starwire: the server was stopped");
        }
        self.queue.take(&mut self.local);
        for command in std::mem::take(&mut self.local) {
            shared::end(command, code::UNAVAILABLE, "starwire: the server was stopped");
        }
        self.links.end_round();
        self.links.stop_star();
    }

    /// When this reactor goes on if nothing comes.
    pub fn wakes_at(&mut self, now: Instant) -> Option<Instant> {
        // A stopped reactor with nothing to close ends at once.
        let has_commands = !self.queue.is_empty() || !self.passed.is_empty() || !self.mailbox.is_empty();
        let has_work = has_commands || self.is_finished(now);
        if has_work { Some(now) } else { self.next_due() }
    }

    fn wait(&mut self, now: Instant) {
        let until = self.wakes_at(now);
        self.waiter.wait(&mut self.links, &mut self.mailbox, now, until);
    }

    pub fn next_due(&mut self) -> Option<Instant> {
        let due = [self.links.next_due(), self.peers.next_due(), self.handshakes_at, self.stopping];
        due.into_iter().flatten().min()
    }

    fn fire_timers(&mut self, now: Instant) {
        self.links.fire_timers();
        self.take_events(now);
        self.peers.tick(now);
        self.carry_out(now);
        if self.handshakes_at.is_some_and(|at| at <= now) {
            self.handshakes_at = None;
            self.resume_handshakes(now);
        }
    }

    fn flush(&mut self, now: Instant) {
        self.links.flush();
        self.take_events(now);
    }

    // Commands.

    fn take_commands(&mut self, now: Instant) {
        self.take_local(now);
        let mut taken = 0;
        while taken < COMMANDS_PER_ROUND {
            let Some(command) = self.passed.pop_front().or_else(|| self.mailbox.pop()) else { break };
            taken += 1;
            if matches!(command, Command::Cancel { .. }) && !self.queue.is_empty() {
                // Its request may be there.
                self.take_local(now);
            }
            self.execute(command, now);
        }
        self.links.metrics().mailbox_messages.add(taken as u64);
    }

    fn take_local(&mut self, now: Instant) {
        let mut local = std::mem::take(&mut self.local);
        self.queue.take(&mut local);
        for command in local.drain(..) {
            if let Command::Request { channel, .. } = &command {
                self.find_channel(*channel, now);
            }
            self.execute(command, now);
        }
        self.local = local;
    }

    /// Another thread has just opened the channel, which is in the mailbox, unless the task has left. Nothing else
    /// there is carried out: it may be the cancellation of a request that a callback has made.
    fn find_channel(&mut self, channel: u32, now: Instant) {
        while self.peers.get(channel).is_none() {
            match self.mailbox.pop() {
                Some(command @ Command::OpenChannel { .. }) => self.execute(command, now),
                Some(command) => self.passed.push_back(command),
                None => return,
            }
        }
    }

    fn execute(&mut self, command: Command<H>, now: Instant) {
        match command {
            Command::Request { channel, id, request } => self.submit(channel, id, request, now),
            Command::Reply { conn, id, code, meta, payload } => self.links.reply(conn, id, code, &meta, payload),
            Command::Cancel { channel, id, code, message } => self.cancel(channel, id, code, &message, now),
            Command::OpenChannel { channel, peer } => {
                self.peers.open(channel, peer, self.shared.config.connect_timeout, self.links.random());
            }
            Command::CloseChannel { channel } => self.close_channel(channel, now),
            Command::Disconnect { channel } => self.disconnect(channel),
            Command::Addresses { channel, result } => {
                self.tell(channel, now, |channel| channel.resolved(result, now));
            }
            Command::Adopt { fd, listener } => self.adopt(fd, listener),
            Command::Star(command) => self.links.star_command(*command),
            Command::Moved { to, last } => {
                self.links.close_moved(to);
                drop(last);
            }
            Command::Stop => self.stop(now),
        }
        self.take_events(now);
    }

    fn stop(&mut self, now: Instant) {
        if self.stopping.is_some() {
            return;
        }
        self.stopping = Some(now + STOP_PATIENCE);
        self.links.stop_listening();
        self.peers.stop(now);
        self.carry_out(now);
        self.links.close_all();
    }
}
