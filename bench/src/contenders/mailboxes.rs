//! What the contenders with something per key have in common: the producer's map from a key to its mailbox.
//!
//! A mailbox is made when its key is first seen and forgotten with the key's last message. Producers have disjoint keys,
//! so that each has a map of its own and none needs a lock.

use std::collections::HashMap;

use foldhash::fast::RandomState;

use crate::contender::Producer;
use crate::message::Message;
use crate::workload::{KeyLife, Workload};

/// How a mailbox is made, filled and left.
pub(super) trait Mailboxes: Send {
    /// The sending end of one key.
    type Mailbox: Send;

    /// Makes the mailbox of a key.
    fn open(&mut self, key: u64) -> Self::Mailbox;

    /// Puts a message into it.
    fn send(&mut self, mailbox: &Self::Mailbox, message: Message);

    /// The key has ended: what is in the mailbox is still handled, nothing more will come.
    fn close(&mut self, mailbox: Self::Mailbox);
}

/// One producer's mailboxes by key.
pub(super) struct MailboxProducer<B: Mailboxes> {
    mailboxes: B,
    by_key: HashMap<u64, B::Mailbox, RandomState>,
    key_life: KeyLife,
}

impl<B: Mailboxes> MailboxProducer<B> {
    pub(super) fn new(mailboxes: B, workload: &Workload) -> Self {
        Self { mailboxes, by_key: HashMap::default(), key_life: workload.key_life() }
    }
}

impl<B: Mailboxes> Producer for MailboxProducer<B> {
    fn submit(&mut self, message: Message) {
        let mailbox = self.by_key.entry(message.key).or_insert_with(|| self.mailboxes.open(message.key));
        self.mailboxes.send(mailbox, message);
        if self.key_life.ends_with(&message)
            && let Some(mailbox) = self.by_key.remove(&message.key)
        {
            self.mailboxes.close(mailbox);
        }
    }
}
