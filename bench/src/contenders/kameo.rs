//! Contender f: an actor per key, with the `kameo` actor library.
//!
//! An actor is spawned with the first message of its key, with an unbounded mailbox, so that the driver's window is the
//! only bound, and stops by itself when its last reference is dropped with the key's last message.

use std::convert::Infallible;

use kameo::actor::{Actor, ActorRef, Spawn};
use kameo::mailbox;
use kameo::message::{Context, Message as Handles};
use tokio::runtime::Handle;

use super::mailboxes::Mailboxes;
use super::on_tokio::{PerKey, Slots, SpawnPerKey};
use crate::message::Message;

pub(super) type Kameo = PerKey<Spawner>;

pub(super) struct KeyActor {
    slots: Slots,
}

impl Actor for KeyActor {
    type Args = Self;
    type Error = Infallible;

    async fn on_start(actor: Self, _reference: ActorRef<Self>) -> Result<Self, Infallible> {
        Ok(actor)
    }
}

impl Handles<Message> for KeyActor {
    type Reply = ();

    async fn handle(&mut self, message: Message, _context: &mut Context<Self, ()>) {
        self.slots.handle(message).await;
    }
}

/// Spawns the actors of one producer.
pub(super) struct Spawner {
    runtime: Handle,
    slots: Slots,
}

impl SpawnPerKey for Spawner {
    const NAME: &'static str = "kameo";
    const ABOUT: &'static str = "an actor per key, kameo (f)";

    fn new(runtime: Handle, slots: Slots) -> Self {
        Self { runtime, slots }
    }
}

impl Mailboxes for Spawner {
    type Mailbox = ActorRef<KeyActor>;

    fn open(&mut self, _key: u64) -> ActorRef<KeyActor> {
        let _inside = self.runtime.enter();
        KeyActor::spawn_with_mailbox(KeyActor { slots: self.slots.clone() }, mailbox::unbounded())
    }

    fn send(&mut self, actor: &ActorRef<KeyActor>, message: Message) {
        actor.tell(message).try_send().expect("an actor lives as long as its reference");
    }

    fn close(&mut self, _actor: ActorRef<KeyActor>) {}
}
