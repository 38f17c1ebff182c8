//! Typed queues: a queue is a type, and a flow says which ones it uses.
//!
//! A step can be routed only to a queue of its flow, and a worker can poll only those: the compiler looks the queue up in
//! [`Flow::Queues`](crate::Flow::Queues). What comes as text (a configuration, SQL) is looked up when the worker starts, and the answer to a
//! name that is not there lists those that are.

use crate::flow::Flow;

/// A queue that flows may use. [`queues!`](crate::queues) makes such types.
pub trait Queue: Copy + Send + Sync + 'static {
    /// Its name in the database, for this flow.
    fn name<F: Flow>() -> &'static str;
}

/// The queue that has the flow's own slug: where steps go when the flow says nothing else.
#[derive(Clone, Copy, Debug, Default)]
pub struct OwnQueue;

impl Queue for OwnQueue {
    fn name<F: Flow>() -> &'static str {
        F::SLUG
    }
}

/// Declares queues: a type each, with its name checked by the compiler.
///
/// ```
/// laneway_flow::queues! {
///     /// Everything that computes.
///     pub DataProcessor = "data_processor";
///     /// Everything that writes to people.
///     pub EmailWorker = "email_worker";
/// }
/// ```
///
/// A name that no queue can have does not compile:
///
/// ```compile_fail
/// laneway_flow::queues! { Email = "E-Mail"; }
/// ```
#[macro_export]
macro_rules! queues {
    ($($(#[$about:meta])* $visibility:vis $queue:ident = $name:literal;)+) => {
        $(
            $(#[$about])*
            #[derive(Clone, Copy, Debug)]
            $visibility struct $queue;

            const _: () = assert!(
                $crate::name::is_queue($name),
                concat!(
                    "the queue ", $name, " has a name that cannot be used: lower-case letters, digits and ",
                    "underscores, no digit first, 1 to 47 characters, and not \"false\""
                )
            );

            impl $crate::Queue for $queue {
                fn name<F: $crate::Flow>() -> &'static str {
                    $name
                }
            }
        )+
    };
}

/// The queues of a flow, as a tuple. The first is where steps go that are routed nowhere else.
pub trait Queues: 'static {
    /// Their names, in the order in which they were written.
    fn names<F: Flow>() -> Vec<&'static str>;
}

/// Said of a tuple of queues that has `Q` in it. `At` is its place, which the compiler finds out.
#[diagnostic::on_unimplemented(
    message = "the flow does not use the queue `{Q}`",
    label = "this queue is not in the flow's `Queues`",
    note = "the queues that it uses are `{Self}`"
)]
pub trait Uses<Q, At> {}

/// A place in a tuple.
#[derive(Debug)]
pub struct At<const PLACE: usize>;

macro_rules! tuples {
    ($($all:ident)+; $($one:ident $place:literal),+) => {
        impl<$($all: Queue),+> Queues for ($($all,)+) {
            fn names<F: Flow>() -> Vec<&'static str> {
                vec![$($all::name::<F>()),+]
            }
        }
        tuples!(@each ($($all)+) $($one $place),+);
    };
    (@each $all:tt $($one:ident $place:literal),+) => {
        $(tuples!(@uses $all $one $place);)+
    };
    (@uses ($($all:ident)+) $one:ident $place:literal) => {
        impl<$($all),+> Uses<$one, At<$place>> for ($($all,)+) {}
    };
}

tuples!(A; A 0);
tuples!(A B; A 0, B 1);
tuples!(A B C; A 0, B 1, C 2);
tuples!(A B C D; A 0, B 1, C 2, D 3);
tuples!(A B C D E; A 0, B 1, C 2, D 3, E 4);
tuples!(A B C D E G; A 0, B 1, C 2, D 3, E 4, G 5);
tuples!(A B C D E G H; A 0, B 1, C 2, D 3, E 4, G 5, H 6);
tuples!(A B C D E G H I; A 0, B 1, C 2, D 3, E 4, G 5, H 6, I 7);
tuples!(A B C D E G H I J; A 0, B 1, C 2, D 3, E 4, G 5, H 6, I 7, J 8);
tuples!(A B C D E G H I J K; A 0, B 1, C 2, D 3, E 4, G 5, H 6, I 7, J 8, K 9);
tuples!(A B C D E G H I J K L; A 0, B 1, C 2, D 3, E 4, G 5, H 6, I 7, J 8, K 9, L 10);
tuples!(A B C D E G H I J K L M; A 0, B 1, C 2, D 3, E 4, G 5, H 6, I 7, J 8, K 9, L 10, M 11);
