//! What users write: handlers, what they decide, and what they are told beside the event.

use std::{fmt, sync::Arc};

use crate::{
    Handle, ProcessorRef,
    processor::{AnyProcessor, Cell},
};

/// What became of an event. A handler may return it, or `()` for [`Done`](Handled::Done), or a `Result` whose error becomes [`Failed`](Handled::Failed).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Handled<E> {
    /// Handled.
    Done,
    /// Not for this handler: the event goes to the system's report.
    Unmatched(E),
    /// Failed, with the reason. It is reported, and not tried again.
    Failed(String),
}

impl<E> From<()> for Handled<E> {
    fn from((): ()) -> Self {
        Handled::Done
    }
}

impl<E, X: fmt::Display> From<Result<(), X>> for Handled<E> {
    fn from(result: Result<(), X>) -> Self {
        match result {
            Ok(()) => Handled::Done,
            Err(error) => Handled::Failed(error.to_string()),
        }
    }
}

/// Handles the events of a processor, one at a time and in order; so it may keep state. Closures need not implement it:
/// [`Registration::handle`](crate::Registration::handle) takes them as they are.
pub trait Handler<E>: Send + 'static {
    /// Handles an event. A panic is a failure of this event and of nothing else.
    fn handle(&mut self, context: &mut Context<'_, E>, event: E) -> Handled<E>;

    /// Before the first event, on a thread of the dispatcher. Only for the handler that a processor is registered with.
    fn started(&mut self, _context: &mut Context<'_, E>) {}

    /// After the last event, once the processor has stopped; for every handler on the stack, the topmost first.
    fn stopped(&mut self) {}
}

/// A closure as a [`Handler`].
pub(crate) struct Closure<F>(pub(crate) F);

impl<E, F, R> Handler<E> for Closure<F>
where
    F: FnMut(&mut Context<'_, E>, E) -> R + Send + 'static,
    R: Into<Handled<E>>,
{
    fn handle(&mut self, context: &mut Context<'_, E>, event: E) -> Handled<E> {
        (self.0)(context, event).into()
    }
}

/// What happens to the handler that another one takes over from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Become {
    /// It waits below until the new one is taken off by `unbecome`.
    Stacked,
    /// It goes, the one that the processor was registered with included.
    Instead,
}

/// A change of the stack of handlers.
pub(crate) enum Change<E> {
    Become(Box<dyn Handler<E>>, Become),
    Unbecome,
}

/// What a handler is told beside the event, and may do.
///
/// Changes of the handler take effect when the handler has returned, in the order in which they were made; those of a handler that
/// panics, or says that it failed, are forgotten.
pub struct Context<'a, E> {
    pub(crate) events: &'a Handle,
    pub(crate) cell: &'a Arc<Cell>,
    pub(crate) thread: usize,
    /// How many handlers there will be when this one has returned.
    pub(crate) depth: usize,
    pub(crate) changes: Vec<Change<E>>,
}

impl<E> fmt::Debug for Context<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("id", &self.cell.id)
            .field("thread", &self.thread)
            .finish_non_exhaustive()
    }
}

impl<E: Send + 'static> Context<'_, E> {
    /// The id of this processor.
    pub fn id(&self) -> &str {
        &self.cell.id
    }

    /// This processor, to be given to others, or posted to.
    pub fn me(&self) -> ProcessorRef<E> {
        ProcessorRef::new(self.cell.clone(), self.events.clone())
    }

    /// The processor that this one was registered under, if any.
    pub fn parent(&self) -> Option<AnyProcessor> {
        self.cell.parent().map(|parent| AnyProcessor::new(parent, self.events.clone()))
    }

    /// The same, if it takes events of this type.
    pub fn parent_of<P: Send + 'static>(&self) -> Option<ProcessorRef<P>> {
        self.parent()?.typed()
    }

    /// The name of the dispatcher.
    pub fn dispatcher(&self) -> &str {
        &self.cell.dispatcher
    }

    /// The number of the thread: its row in the assignment.
    pub fn thread(&self) -> usize {
        self.thread
    }

    /// The whole system: to register, look up, broadcast, schedule, stop.
    pub fn events(&self) -> &Handle {
        self.events
    }

    /// Handles the next events by this closure; the handler of this moment waits below it.
    pub fn become_stacked<F, R>(&mut self, handler: F)
    where
        F: FnMut(&mut Context<'_, E>, E) -> R + Send + 'static,
        R: Into<Handled<E>> + 'static,
    {
        self.become_handler(Closure(handler), Become::Stacked);
    }

    /// Handles the next events by this closure; the handler of this moment goes, the first one included.
    pub fn become_instead<F, R>(&mut self, handler: F)
    where
        F: FnMut(&mut Context<'_, E>, E) -> R + Send + 'static,
        R: Into<Handled<E>> + 'static,
    {
        self.become_handler(Closure(handler), Become::Instead);
    }

    /// Handles the next events by this handler.
    pub fn become_handler(&mut self, handler: impl Handler<E>, how: Become) {
        self.depth += usize::from(how == Become::Stacked);
        self.changes.push(Change::Become(Box::new(handler), how));
    }

    /// Takes the topmost handler off the stack. False if it is the only one: that one stays.
    pub fn unbecome(&mut self) -> bool {
        let possible = self.depth > 1;
        if possible {
            self.depth -= 1;
            self.changes.push(Change::Unbecome);
        }
        possible
    }

    /// Stops this processor: no more events are accepted, those that are in the mailbox are handled, and then it goes.
    pub fn stop(&mut self) {
        self.events.begin_stop(self.cell);
    }
}

/// The handlers of a processor, the topmost last. Never empty until the processor has stopped.
pub(crate) struct Stack<E>(pub(crate) Vec<Box<dyn Handler<E>>>);

impl<E> Stack<E> {
    pub(crate) fn apply(&mut self, change: Change<E>) {
        match change {
            Change::Become(handler, Become::Stacked) => self.0.push(handler),
            Change::Become(handler, Become::Instead) => {
                self.0.pop();
                self.0.push(handler);
            }
            Change::Unbecome if self.0.len() > 1 => drop(self.0.pop()),
            Change::Unbecome => {}
        }
    }
}
