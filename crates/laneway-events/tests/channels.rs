//! Channels: who gets what, in which order, and who is told when somebody does not.

mod witness;

use std::{
    sync::{Arc, mpsc::channel},
    thread,
};

use laneway_events::{LookupError, NotPostedReason, ProcessorRef, Refusal};
use witness::{DEADLINE, door, system};

fn names(set: std::collections::BTreeSet<Arc<str>>) -> Vec<String> {
    set.into_iter().map(|name| name.to_string()).collect()
}

#[test]
fn subscriptions_are_added_set_and_taken_back() {
    let events = system(&[&[""]]);
    let one = events.processor("one").subscribe(&["a", "b"]).handle(|_, _: u32| ()).unwrap();
    let other = events.processor("other").handle(|_, _: u32| ()).unwrap();
    assert_eq!(names(events.subscriptions(&one)), ["a", "b"]);
    assert_eq!(names(events.subscribe(&one, &["b", "c"])), ["a", "b", "c"]);
    assert_eq!(names(events.subscribe(&other, &["c"])), ["c"]);
    assert_eq!(names(events.set_subscriptions(&one, &["c", "d"])), ["c", "d"]);
    assert_eq!(names(events.unsubscribe(&one, &["d", "never"])), ["c"]);
    assert_eq!(events.broadcast(&["c"], 1_u32).delivered, 2);
    events.unsubscribe_all(&one);
    assert_eq!(events.broadcast(&["a", "b", "c", "d"], 1_u32).delivered, 1);
    assert_eq!(events.snapshot().channels, 1, "a channel without subscribers is gone");
}

/// In the original `unsubscribe(X, channel)` took Y off the channel if X was not on it.
#[test]
fn who_is_not_on_a_channel_takes_nobody_else_off_it() {
    let events = system(&[&[""]]);
    let x = events.processor("x").handle(|_, _: u32| ()).unwrap();
    let y = events.processor("y").subscribe(&["channel"]).handle(|_, _: u32| ()).unwrap();
    assert!(events.unsubscribe(&x, &["channel"]).is_empty());
    assert_eq!(names(events.subscriptions(&y)), ["channel"]);
    assert_eq!(events.broadcast(&["channel"], 1_u32).delivered, 1);
}

#[test]
fn a_subscriber_of_several_channels_gets_a_broadcast_once() {
    let events = system(&[&[""]]);
    let (tell, told) = channel();
    events
        .processor("p")
        .subscribe(&["a", "b", "c"])
        .handle(move |_, event: u32| tell.send(event).unwrap())
        .unwrap();
    assert_eq!(events.broadcast(&["a", "b"], 1_u32).delivered, 1);
    assert_eq!(events.broadcast(&["c", "c"], 2_u32).delivered, 1);
    assert!(events.wait_quiet(DEADLINE));
    assert_eq!(told.try_iter().collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn whoever_does_not_get_it_is_named_to_the_sender() {
    let events = system(&[&[""], &[""]]);
    let (gate, porter) = door();
    let full = events.processor("full").queue_size(1).subscribe(&["news"]);
    let full = full.handle(move |_, _: u32| gate.pass()).unwrap();
    events.processor("texts").subscribe(&["news"]).handle(|_, _: &str| ()).unwrap();
    events.processor("fine").subscribe(&["news"]).handle(|_, _: u32| ()).unwrap();
    full.post(0).unwrap();
    porter.wait_for_arrival();
    let broadcast = events.broadcast(&["news"], 1_u32);
    assert_eq!(broadcast.delivered, 1);
    let missed: Vec<_> =
        broadcast.not_delivered.iter().map(|missed| (&*missed.processor, &missed.reason)).collect();
    let wrong = LookupError::WrongType { id: "texts".to_owned(), takes: "&str", given: "u32" };
    let wanted =
        [("full", &NotPostedReason::Refused(Refusal::QueueFull)), ("texts", &NotPostedReason::Lookup(wrong))];
    assert_eq!(missed, wanted);
    porter.open();
}

/// In the original a stop never unsubscribed.
#[test]
fn a_processor_that_has_stopped_is_on_no_channel_and_cannot_get_on_one() {
    let events = system(&[&[""]]);
    let processor = events.processor("p").subscribe(&["a"]).handle(|_, _: u32| ()).unwrap();
    let _ = processor.stop(DEADLINE);
    assert!(events.subscriptions(&processor).is_empty());
    assert!(events.subscribe(&processor, &["a"]).is_empty());
    let broadcast = events.broadcast(&["a"], 1_u32);
    assert_eq!((broadcast.delivered, broadcast.not_delivered.len()), (0, 0));
}

/// Several senders, several subscribers, while subscriptions of others come and go: from each sender each subscriber gets all, in order.
#[test]
fn order_holds_per_sender_and_subscriber() {
    const SENDERS: usize = 3;
    const EACH: u32 = 2_000;
    let events = system(&[&["a", "b"], &["b", "a"], &["a"]]);
    let (tell, told) = channel();
    let subscribers: Vec<ProcessorRef<(usize, u32)>> = (0..4)
        .map(|number| {
            let (tell, mut next) = (tell.clone(), [0_u32; SENDERS]);
            let dispatcher = if number % 2 == 0 { "a" } else { "b" };
            let registration = events.anonymous().dispatcher(dispatcher).subscribe(&["all"]);
            let handler = move |_: &mut laneway_events::Context<'_, _>, (sender, event): (usize, u32)| {
                assert_eq!(event, next[sender], "from sender {sender}");
                next[sender] += 1;
                if next == [EACH; SENDERS] {
                    tell.send(()).unwrap();
                }
            };
            registration.handle(handler).unwrap()
        })
        .collect();
    thread::scope(|scope| {
        for sender in 0..SENDERS {
            let events = events.handle();
            scope.spawn(move || {
                for event in 0..EACH {
                    let broadcast = events.broadcast(&["all"], (sender, event));
                    assert!(broadcast.delivered >= 4 && broadcast.not_delivered.is_empty(), "{broadcast:?}");
                }
            });
        }
        let events = &events;
        scope.spawn(move || {
            for _ in 0..200 {
                let guest = events.anonymous().dispatcher("a").handle(|_, _: (usize, u32)| ()).unwrap();
                events.subscribe(&guest, &["all"]);
                events.unsubscribe_all(&guest);
            }
        });
    });
    subscribers.iter().for_each(|_| told.recv_timeout(DEADLINE).expect("each gets everything"));
}
