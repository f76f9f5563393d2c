//! One simulated worker: plays recorded steps.

use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::disguise::Disguise;
use crate::link::{Ask, Event, Link, StarRequest};
use crate::recording::{MAX_OPERATIONS, Recording, Step, What};
use crate::star;

/// Marks the token of a registration: the rest is the token of the call that wants it.
const REGISTRATION: u64 = 1 << 63;
/// As a real worker (cc/star/client.cc): how often a server may forget a plan between its registration and the call.
const MAX_REGISTRATIONS: usize = 8;
/// How long after its requests the end of a connection is heard of.
const NEWS: Duration = Duration::from_millis(500);

pub struct Worker {
    pub index: usize,
    recording: Rc<Recording>,
    disguise: Disguise,
    link: Box<dyn Link>,
    events: UnboundedReceiver<Event>,
    patience: Duration,
    /// Steps begun.
    steps: u64,
    /// Requests whose end was not heard of yet.
    outstanding: usize,
    is_lost: bool,
}

/// How a step went.
pub struct Played {
    /// Which of the recorded steps it was.
    pub which: usize,
    pub took: Duration,
    /// Plans that the server wanted.
    pub registrations: usize,
}

/// A step that is being played.
struct Progress {
    number: u64,
    id: u64,
    needs: Vec<usize>,
    /// Tensors that the parameter server asked for before they were there.
    asked: Vec<Option<u64>>,
    /// Operations that ended, whose followers have not been looked at.
    ended: Vec<usize>,
    /// Operations that the step still waits for.
    left: usize,
    registrations: usize,
}

impl Progress {
    /// Which operation a token belongs to, and whether it is one of this step's.
    fn which(&self, token: u64) -> (usize, bool) {
        let token = token & !REGISTRATION;
        let index = usize::try_from(token % MAX_OPERATIONS as u64).expect("less than MAX_OPERATIONS");
        (index.min(self.needs.len() - 1), token / MAX_OPERATIONS as u64 == self.number)
    }
}

impl Worker {
    pub fn new(
        index: usize,
        recording: &Rc<Recording>,
        link: Box<dyn Link>,
        events: UnboundedReceiver<Event>,
        patience: Duration,
    ) -> Self {
        let disguise = Disguise::new(index, recording);
        Self {
            index,
            recording: recording.clone(),
            disguise,
            link,
            events,
            patience,
            steps: 0,
            outstanding: 0,
            is_lost: false,
        }
    }

    /// Makes the calls that come before the first step.
    pub async fn set_up(&mut self) -> Result<(), String> {
        let recording = self.recording.clone();
        for call in &recording.setup {
            let request = self.disguise.call(call, 0).map_err(|_| bad_recording(&call.name))?;
            self.outstanding += 1;
            self.link.call(u64::MAX, &call.name, call.method, request);
            let reply = match self.next().await? {
                Event::Ended { result, .. } => result.map_err(|why| self.explain(&call.name, &why))?,
                Event::Asked { edge, .. } => {
                    return Err(self.explain(&call.name, &format!("the server requested {edge} before any step")));
                }
                Event::Unknown { .. } => {
                    return Err(self.explain(&call.name, "the server requested a plan before any step"));
                }
                Event::Lost(why) => return Err(self.lost(&why)),
            };
            self.disguise.take(call, &reply).map_err(|why| self.explain(&call.name, &why))?;
        }
        Ok(())
    }

    pub async fn step(&mut self) -> Result<Played, String> {
        let recording = self.recording.clone();
        let count = recording.steps.len();
        // Neighbours are at different steps.
        let which = (self.index + usize::try_from(self.steps % count as u64).expect("less than count")) % count;
        let step = &recording.steps[which];
        let begun = Instant::now();
        let mut progress = Progress {
            number: self.steps,
            id: self.disguise.step_id(self.steps),
            needs: step.operations.iter().map(|operation| operation.needs).collect(),
            asked: vec![None; step.operations.len()],
            ended: Vec::new(),
            left: step.waited,
            registrations: 0,
        };
        self.steps += 1;
        for index in 0..step.operations.len() {
            if progress.needs[index] == 0 {
                self.start(step, &mut progress, index)?;
            }
        }
        self.follow(step, &mut progress)?;
        while progress.left > 0 {
            let event = self.next().await?;
            self.handle(step, &mut progress, event)?;
            self.follow(step, &mut progress)?;
        }
        Ok(Played { which, took: begun.elapsed(), registrations: progress.registrations })
    }

    /// Waits for the ends that no step waited for.
    pub async fn settle(&mut self) -> Result<(), String> {
        while self.outstanding > 0 {
            match self.next().await? {
                Event::Ended { result, .. } => {
                    result.map_err(|why| self.explain("the last call", &why))?;
                }
                Event::Asked { edge, .. } => return Err(self.explain(&edge, "requested after the last step")),
                Event::Unknown { .. } => return Err(self.explain("a plan", "requested after the last step")),
                Event::Lost(why) => return Err(self.lost(&why)),
            }
        }
        Ok(())
    }

    fn start(&mut self, step: &Step, progress: &mut Progress, index: usize) -> Result<(), String> {
        let token = progress.number * MAX_OPERATIONS as u64 + index as u64;
        match &step.operations[index].what {
            What::Call(call) => {
                let request = self.disguise.call(call, progress.id).map_err(|_| bad_recording(&call.name))?;
                self.outstanding += 1;
                self.link.call(token, &call.name, call.method, request);
            }
            What::Pull(pull) => {
                let key = self.disguise.key(&pull.key);
                let request = || self.disguise.request(&pull.request, &pull.set, None, progress.id, &key);
                self.outstanding += 1;
                self.link.pull(token, Ask { step: progress.id, key: &key, request: &request, bytes: pull.bytes });
            }
            What::Star(call) => {
                let step = i64::try_from(progress.id).map_err(|error| self.explain("a step", &error.to_string()))?;
                let meta = self
                    .disguise
                    .star_call(call, step)
                    .map_err(|error| self.explain("a star call", &error.to_string()))?;
                let (parts, bytes) = (call.parts.clone(), call.bytes);
                self.outstanding += 1;
                self.link.star(token, StarRequest { method: star::CALL, meta, parts, bytes });
            }
            What::Push(tensor) => {
                if let Some(asker) = progress.asked[index].take() {
                    self.link.answer(asker, tensor);
                    progress.ended.push(index);
                }
            }
        }
        Ok(())
    }

    fn handle(&mut self, step: &Step, progress: &mut Progress, event: Event) -> Result<(), String> {
        match event {
            Event::Ended { token, result } => {
                let (index, mine) = progress.which(token);
                match result {
                    Ok(_) if mine && token & REGISTRATION != 0 => self.start(step, progress, index)?,
                    Ok(_) if mine => progress.ended.push(index),
                    Ok(_) => {}
                    Err(why) => {
                        let name = match &step.operations[index].what {
                            What::Call(call) => call.name.as_str(),
                            What::Pull(pull) => pull.key.as_str(),
                            What::Push(_) => "a push",
                            What::Star(_) => "a star call",
                        };
                        return Err(self.explain(if mine { name } else { "a call of the previous step" }, &why));
                    }
                }
            }
            Event::Unknown { token } => {
                let (index, mine) = progress.which(token);
                let What::Star(call) = &step.operations[index].what else {
                    return Err(self.explain("a plan", "requested by an operation that has none"));
                };
                progress.registrations += 1;
                if !mine || progress.registrations > MAX_REGISTRATIONS * step.operations.len() {
                    return Err(self.explain("a star call", "the server evicts plans as soon as they are registered"));
                }
                let meta = self.disguise.star_register(&call.plan);
                let meta = meta.map_err(|error| self.explain("a star call", &error.to_string()))?;
                let Some(parts) = self.recording.plans.get(&call.plan).cloned() else {
                    return Err(self.explain("a star call", "its plan was not recorded"));
                };
                self.outstanding += 1;
                self.link.star(token | REGISTRATION, StarRequest { method: star::REGISTER, meta, parts, bytes: 0 });
            }
            Event::Asked { step: id, edge, asker } => {
                let found = step.pushes.get(&edge).filter(|_| id == progress.id);
                let Some(&index) = found else {
                    return Err(self.explain(&edge, "the server requested a tensor that this step does not have"));
                };
                if progress.asked[index].replace(asker).is_some() {
                    return Err(self.explain(&edge, "the server requested the same tensor twice"));
                }
                if progress.needs[index] == 0 {
                    self.start(step, progress, index)?;
                }
            }
            Event::Lost(why) => return Err(self.lost(&why)),
        }
        Ok(())
    }

    /// Starts what waited for operations that ended.
    fn follow(&mut self, step: &Step, progress: &mut Progress) -> Result<(), String> {
        while let Some(index) = progress.ended.pop() {
            let operation = &step.operations[index];
            progress.left -= usize::from(operation.wait && progress.left > 0);
            for &follower in &operation.followers {
                let needs = &mut progress.needs[follower];
                *needs = needs.checked_sub(1).ok_or_else(|| self.explain("an operation", "it ended twice"))?;
                if *needs == 0 {
                    self.start(step, progress, follower)?;
                }
            }
        }
        Ok(())
    }

    async fn next(&mut self) -> Result<Event, String> {
        // Most of the time there is one: no timer for those.
        let event = match self.events.try_recv() {
            Ok(event) => Some(event),
            Err(_) => match tokio::time::timeout(self.patience, self.events.recv()).await {
                Ok(event) => event,
                Err(_) => {
                    let seconds = self.patience.as_secs();
                    return Err(format!(
                        "worker {} received nothing from the parameter server for {seconds} s",
                        self.index
                    ));
                }
            },
        };
        let event = event.unwrap_or_else(|| Event::Lost("its connection has ended".to_owned()));
        self.is_lost |= matches!(event, Event::Lost(_));
        let ended = matches!(event, Event::Ended { .. } | Event::Unknown { .. });
        self.outstanding -= usize::from(ended && self.outstanding > 0);
        Ok(event)
    }

    /// Whether a step failed because the connection is gone: requests that are under way fail first.
    pub async fn has_lost_its_server(&mut self) -> bool {
        let heard = async {
            while !self.is_lost {
                self.is_lost = matches!(self.events.recv().await, Some(Event::Lost(_)) | None);
            }
        };
        tokio::time::timeout(NEWS, heard).await.is_ok()
    }

    fn explain(&self, what: &str, why: &str) -> String {
        format!("worker {}: {what}: {why}", self.index)
    }

    fn lost(&self, why: &str) -> String {
        format!("worker {} lost the parameter server: {why}", self.index)
    }
}

fn bad_recording(name: &str) -> String {
    format!("the recorded request of {name} is not a protocol buffer")
}

/// What a reply without content is.
pub fn nothing() -> Bytes {
    Bytes::new()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::Arc;

    use tokio::sync::mpsc::unbounded_channel;

    use super::*;
    use crate::link::Events;
    use crate::tensor::Tensor;

    /// Ends calls and pulls at once, keeps what was answered, and asks for "e2" when "e1" is pulled.
    struct Fake {
        events: Events,
        log: Rc<RefCell<Vec<String>>>,
        asks: &'static [&'static str],
    }

    impl Link for Fake {
        fn call(&self, token: u64, name: &str, _: u16, _: Vec<u8>) {
            self.log.borrow_mut().push(name.to_owned());
            let _ = self.events.send(Event::Ended { token, result: Ok(nothing()) });
        }
        fn pull(&self, token: u64, pull: Ask<'_>) {
            self.log.borrow_mut().push(format!("pull {}", pull.key));
            for edge in self.asks {
                let _ = self.events.send(Event::Asked { step: pull.step, edge: (*edge).to_owned(), asker: 7 });
            }
            let _ = self.events.send(Event::Ended { token, result: Ok(nothing()) });
        }
        /// Knows a plan once it was registered.
        fn star(&self, token: u64, request: StarRequest) {
            let known = self.log.borrow().iter().any(|line| line.starts_with("register"));
            let (line, event) = match request.method {
                star::REGISTER => {
                    (format!("register {:?}", request.parts[0]), Event::Ended { token, result: Ok(nothing()) })
                }
                _ if known || self.asks.is_empty() => {
                    ("star call".to_owned(), Event::Ended { token, result: Ok(nothing()) })
                }
                _ => ("unknown".to_owned(), Event::Unknown { token }),
            };
            if !self.asks.contains(&"forget") || request.method == star::REGISTER {
                self.log.borrow_mut().push(line);
                let _ = self.events.send(event);
            } else {
                let _ = self.events.send(Event::Unknown { token });
            }
        }
        fn answer(&self, asker: u64, _: &Arc<Tensor>) {
            self.log.borrow_mut().push(format!("answer {asker}"));
        }
    }

    const FILE: &[u8] = br#"{"starwire_swarm":1,"model":"m","ps":"p","worker":"/job:worker/replica:0/task:0","setup":[],"steps":[{"operations":[{"call":"RunGraph","method":6,"request":[0,0],"set":{},"after":[]},{"pull":"p;f;w;e1;0:0","request":[0,0],"set":{},"bytes":4,"after":[]},{"push":"w;1;p;e2;0:0","dtype":1,"dims":[1],"content":[0,4],"after":[1]},{"call":"CleanupGraph","method":7,"request":[0,0],"set":{},"after":[0,2],"wait":false}]}]}
aaaa"#;

    fn play(asks: &'static [&'static str]) -> (Result<usize, String>, Vec<String>) {
        play_file(Bytes::from_static(FILE), asks)
    }

    fn play_file(file: Bytes, asks: &'static [&'static str]) -> (Result<usize, String>, Vec<String>) {
        let recording = Rc::new(Recording::parse(file).unwrap());
        let (events, heard) = unbounded_channel();
        let log = Rc::new(RefCell::new(Vec::new()));
        let link = Box::new(Fake { events, log: log.clone(), asks });
        let mut worker = Worker::new(3, &recording, link, heard, Duration::from_millis(50));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let result = runtime.block_on(async {
            let played = worker.step().await?;
            worker.settle().await?;
            Ok(played.which)
        });
        let log = log.borrow().clone();
        (result, log)
    }

    /// A step of one star call, whose plan is "plan".
    fn star_file() -> Bytes {
        let (name, head) = ("07".repeat(32), [&[2][..], &[0; 31], &[7; 32], &[0; 16]].concat());
        let json = format!(
            r#"{{"starwire_swarm":1,"model":"m","ps":"p","worker":"/job:worker/replica:0/task:0","setup":[],"plans":{{"{name}":[80,4]}},"steps":[{{"operations":[{{"star":"{name}","meta":[0,80],"parts":[],"bytes":0,"feeds":0,"fetches":1,"after":[]}}]}}]}}"#
        );
        [json.as_bytes(), b"\n", &head, b"plan"].concat().into()
    }

    #[test]
    fn plans_are_registered_when_the_server_asks() {
        assert_eq!(play_file(star_file(), &[]), (Ok(0), vec!["star call".to_owned()]));
        let (result, log) = play_file(star_file(), &["plan"]);
        assert_eq!((result, log), (Ok(0), ["unknown", "register b\"plan\"", "star call"].map(str::to_owned).to_vec()));
        let (result, log) = play_file(star_file(), &["forget"]);
        assert!(result.unwrap_err().contains("the server evicts plans as soon as they are registered"));
        assert_eq!(log.len(), MAX_REGISTRATIONS);
    }

    #[test]
    fn operations_wait_for_what_they_need() {
        let (result, log) = play(&["e2"]);
        assert_eq!(result, Ok(0));
        assert_eq!(log, ["RunGraph", "pull p;0000000000000000;w;e1;0:0", "answer 7", "CleanupGraph"]);
    }

    #[test]
    fn a_server_that_asks_for_something_else_is_told_on() {
        assert!(play(&["e3"]).0.unwrap_err().contains("worker 3: e3: the server requested a tensor that this step"));
        assert!(play(&["e2", "e2"]).0.unwrap_err().contains("the same tensor twice"));
    }

    #[test]
    fn a_step_that_does_not_end_is_given_up() {
        assert!(play(&[]).0.unwrap_err().contains("received nothing from the parameter server"));
    }
}
