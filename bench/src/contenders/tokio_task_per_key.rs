//! Contender g: a tokio task and an unbounded channel per key.
//!
//! What one writes on tokio without an actor library. The task ends when the key's last message closes its channel.

use tokio::runtime::Handle;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use super::mailboxes::Mailboxes;
use super::on_tokio::{PerKey, Slots, SpawnPerKey};
use crate::message::Message;

pub(super) type TokioTaskPerKey = PerKey<Spawner>;

/// Spawns the tasks of one producer.
pub(super) struct Spawner {
    runtime: Handle,
    slots: Slots,
}

impl SpawnPerKey for Spawner {
    const NAME: &'static str = "tokio-task-per-key";
    const ABOUT: &'static str = "a tokio task and channel per key (g)";

    fn new(runtime: Handle, slots: Slots) -> Self {
        Self { runtime, slots }
    }
}

impl Mailboxes for Spawner {
    type Mailbox = UnboundedSender<Message>;

    fn open(&mut self, _key: u64) -> UnboundedSender<Message> {
        let (sender, mut receiver) = unbounded_channel();
        let slots = self.slots.clone();
        self.runtime.spawn(async move {
            while let Some(message) = receiver.recv().await {
                slots.handle(message).await;
            }
        });
        sender
    }

    fn send(&mut self, sender: &UnboundedSender<Message>, message: Message) {
        sender.send(message).expect("a task lives as long as its sender");
    }

    fn close(&mut self, _sender: UnboundedSender<Message>) {}
}
