//! Flow control between the two ends of a stream: counters that travel with every message. They count from the start of
//! the connection and wrap around.

use super::error::VerbsError;
use super::wire::Head;

#[derive(Clone, Debug, Default)]
pub struct Ledger {
    /// Messages with data that we sent; of these, those that the peer has processed.
    sent: u32,
    credited: u32,
    /// Messages with data that we have processed; of these, those that the peer has been told of.
    worked_off: u32,
    told_worked_off: u32,
    offers_made: u32,
    offers_done: u32,
    offers_read: u32,
    told_offers_read: u32,
    news_sent: u32,
    news_confirmed: u32,
    news_seen: u32,
    told_news_seen: u32,
}

/// A message that must be sent even without data to carry it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    News,
    Confirmation,
}

impl Ledger {
    /// Whether the peer, which has `slots` buffers, can take another message with data.
    pub fn has_credit(&self, slots: u16) -> bool {
        self.sent.wrapping_sub(self.credited) < u32::from(slots)
    }

    pub fn sent_data(&mut self, offers: u16) {
        self.sent = self.sent.wrapping_add(1);
        self.offers_made = self.offers_made.wrapping_add(u32::from(offers));
    }

    /// A message with data has been processed: its buffer is free again.
    pub fn worked_off(&mut self) {
        self.worked_off = self.worked_off.wrapping_add(1);
    }

    pub fn read_offers(&mut self, count: u32) {
        self.offers_read = self.offers_read.wrapping_add(count);
    }

    /// Takes in a message's counters. Returns how many more of our offers the peer has finished.
    pub fn hear(&mut self, head: &Head) -> Result<u32, VerbsError> {
        let step = |now: u32, before: u32, last: u32| {
            let step = now.wrapping_sub(before);
            if step > last.wrapping_sub(before) {
                Err(VerbsError::Peer("it acknowledges more than was sent"))
            } else {
                Ok(step)
            }
        };
        step(head.credits, self.credited, self.sent)?;
        step(head.confirmed, self.news_confirmed, self.news_sent)?;
        let done = step(head.done, self.offers_done, self.offers_made)?;
        (self.credited, self.news_confirmed, self.offers_done) = (head.credits, head.confirmed, head.done);
        if head.is_news {
            self.news_seen = self.news_seen.wrapping_add(1);
        }
        Ok(done)
    }

    /// Fills in the counters of a message that is sent now.
    pub fn tell(&mut self, head: Head) -> Head {
        if head.is_news {
            self.news_sent = self.news_sent.wrapping_add(1);
        }
        (self.told_worked_off, self.told_offers_read, self.told_news_seen) =
            (self.worked_off, self.offers_read, self.news_seen);
        Head { credits: self.worked_off, done: self.offers_read, confirmed: self.news_seen, ..head }
    }

    /// The peer keeps a buffer for one message with news at a time.
    pub fn may_tell_news(&self) -> bool {
        self.news_sent == self.news_confirmed
    }

    /// Returns the message that cannot wait for data. `slots`: the number of buffers that the peer fills.
    pub fn due(&self, slots: u16) -> Option<Due> {
        let owed = self.worked_off.wrapping_sub(self.told_worked_off);
        let has_news = self.offers_read != self.told_offers_read || owed >= u32::from(slots).div_ceil(2);
        if has_news && self.may_tell_news() {
            Some(Due::News)
        } else {
            (self.news_seen != self.told_news_seen).then_some(Due::Confirmation)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOTS: u16 = 4;

    /// Two ledgers whose counters are about to wrap around.
    fn pair() -> [Ledger; 2] {
        let at = u32::MAX - 2;
        let one = Ledger {
            sent: at,
            credited: at,
            worked_off: at,
            told_worked_off: at,
            offers_made: at,
            offers_done: at,
            offers_read: at,
            told_offers_read: at,
            news_sent: at,
            news_confirmed: at,
            news_seen: at,
            told_news_seen: at,
        };
        [one.clone(), one]
    }

    fn send(ledger: &mut Ledger, offers: u16) -> Head {
        ledger.sent_data(offers);
        ledger.tell(Head { is_data: true, offers, ..Head::default() })
    }

    #[test]
    fn credits_run_out_and_return_with_any_message() {
        let [mut a, mut b] = pair();
        for _ in 0..3 {
            for left in (0..SLOTS).rev() {
                let head = send(&mut a, 0);
                assert_eq!(b.hear(&head).unwrap(), 0);
                assert_eq!(a.has_credit(SLOTS), left > 0);
            }
            assert_eq!(b.due(SLOTS), None);
            b.worked_off();
            assert_eq!(b.due(SLOTS), None, "few are owed: they wait for data");
            (0..3).for_each(|_| b.worked_off());
            let head = send(&mut b, 0);
            a.hear(&head).unwrap();
            a.worked_off();
            assert!(a.has_credit(SLOTS) && b.due(SLOTS).is_none());
        }
    }

    #[test]
    fn news_wait_for_the_last_confirmation() {
        let [mut a, mut b] = pair();
        for _ in 0..5 {
            b.hear(&send(&mut a, 2)).unwrap();
            b.worked_off();
            b.read_offers(1);
            assert_eq!(b.due(SLOTS), Some(Due::News));
            let news = b.tell(Head { is_news: true, ..Head::default() });
            b.read_offers(1);
            assert_eq!(b.due(SLOTS), None, "one at a time");
            assert_eq!(a.hear(&news).unwrap(), 1);
            assert_eq!(a.due(SLOTS), Some(Due::Confirmation));
            b.hear(&a.tell(Head::default())).unwrap();
            assert_eq!((a.due(SLOTS), b.due(SLOTS)), (None, Some(Due::News)));
            let news = b.tell(Head { is_news: true, ..Head::default() });
            assert_eq!(a.hear(&news).unwrap(), 1);
            b.hear(&a.tell(Head::default())).unwrap();
        }
    }

    #[test]
    fn impossible_counts_are_refused() {
        let [mut a, mut b] = pair();
        let head = send(&mut a, 1);
        b.hear(&head).unwrap();
        let honest = b.tell(Head::default());
        for lie in [
            Head { credits: honest.credits.wrapping_add(2), ..honest },
            Head { credits: honest.credits.wrapping_sub(1), ..honest },
            Head { done: honest.done.wrapping_add(2), ..honest },
            Head { confirmed: honest.confirmed.wrapping_add(1), ..honest },
        ] {
            assert!(a.clone().hear(&lie).is_err(), "{lie:?}");
        }
        assert!(a.hear(&honest).is_ok());
    }
}
