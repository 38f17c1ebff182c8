//! Contender f: an actor per key, with the `ractor` actor library.
//!
//! An actor is spawned with the first message of its key and stops itself after the last. It is not drained from outside:
//! an actor that is told to drain before it has started never starts, and its mailbox is lost. Mailboxes are unbounded, so
//! that the driver's window is the only bound.

use ractor::{Actor, ActorProcessingErr, ActorRef, ActorRuntime};
use tokio::runtime::Handle;

use super::mailboxes::Mailboxes;
use super::on_tokio::{PerKey, Slots, SpawnPerKey};
use crate::message::Message;

pub(super) type Ractor = PerKey<Spawner>;

struct KeyActor {
    slots: Slots,
}

impl Actor for KeyActor {
    type Msg = Message;
    type State = ();
    type Arguments = ();

    async fn pre_start(&self, _myself: ActorRef<Message>, _arguments: ()) -> Result<(), ActorProcessingErr> {
        Ok(())
    }

    async fn handle(
        &self,
        myself: ActorRef<Message>,
        message: Message,
        _state: &mut (),
    ) -> Result<(), ActorProcessingErr> {
        self.slots.handle(message).await;
        if self.slots.key_life().ends_with(&message) {
            myself.stop(None);
        }
        Ok(())
    }
}

/// Spawns the actors of one producer.
pub(super) struct Spawner {
    runtime: Handle,
    slots: Slots,
}

impl SpawnPerKey for Spawner {
    const NAME: &'static str = "ractor";
    const ABOUT: &'static str = "an actor per key, ractor (f)";

    fn new(runtime: Handle, slots: Slots) -> Self {
        Self { runtime, slots }
    }
}

impl Mailboxes for Spawner {
    type Mailbox = ActorRef<Message>;

    fn open(&mut self, _key: u64) -> ActorRef<Message> {
        let _inside = self.runtime.enter();
        let actor = KeyActor { slots: self.slots.clone() };
        let (reference, _started) = ActorRuntime::spawn_instant(None, actor, ())
            .expect("an actor without a name can always be spawned");
        reference
    }

    fn send(&mut self, actor: &ActorRef<Message>, message: Message) {
        actor.send_message(message).expect("an actor lives until its last message");
    }

    fn close(&mut self, _actor: ActorRef<Message>) {}
}
