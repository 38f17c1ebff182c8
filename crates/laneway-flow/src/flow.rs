//! The DSL: a flow is a type, its steps are values, and the compiler connects them.
//!
//! ```
//! use laneway_flow::{Context, Failure, Flow, Steps, queues};
//!
//! queues! {
//!     DataProcessor = "data_processor";
//!     EmailWorker = "email_worker";
//! }
//!
//! struct DataFlow;
//!
//! impl Flow for DataFlow {
//!     const SLUG: &'static str = "data_flow";
//!     type Input = String;
//!     type Queues = (DataProcessor, EmailWorker);
//!
//!     fn steps(&self, flow: &mut Steps<Self>) {
//!         let fetch = flow.step("fetch").run(|url: String, _| async move { Ok(url.len()) });
//!         let notify = flow
//!             .step("notify")
//!             .after(&fetch)
//!             .queue(EmailWorker)
//!             .run(|length: usize, _| async move { Ok(format!("{length} characters")) });
//!         flow.step("debug").after((&fetch, &notify)).manual::<bool>();
//!     }
//! }
//!
//! let flow = DataFlow.define()?;
//! assert_eq!(flow.definition().queues(), ["data_processor", "email_worker"]);
//! # Ok::<(), laneway_flow::DefineError>(())
//! ```
//!
//! # What does not compile
//!
//! A dependency is the value that its step gave back, so that an unknown one cannot be named:
//!
//! ```compile_fail,E0425
//! # use laneway_flow::{Flow, OwnQueue, Steps};
//! # struct Example;
//! # impl Flow for Example {
//! #     const SLUG: &'static str = "example";
//! #     type Input = String;
//! #     type Queues = (OwnQueue,);
//! fn steps(&self, flow: &mut Steps<Self>) {
//!     flow.step("notify").after(&fetch).run(|length: usize, _| async move { Ok(length) });
//! }
//! # }
//! ```
//!
//! A step of another flow is no dependency either:
//!
//! ```compile_fail,E0277
//! # use laneway_flow::{Flow, OwnQueue, Step, Steps};
//! # struct Other;
//! # struct Example(Step<Other, usize>);
//! # impl Flow for Other {
//! #     const SLUG: &'static str = "other";
//! #     type Input = String;
//! #     type Queues = (OwnQueue,);
//! #     fn steps(&self, flow: &mut Steps<Self>) {}
//! # }
//! # impl Flow for Example {
//! #     const SLUG: &'static str = "example";
//! #     type Input = String;
//! #     type Queues = (OwnQueue,);
//! fn steps(&self, flow: &mut Steps<Self>) {
//!     let of_another_flow: &Step<Other, usize> = &self.0;
//!     flow.step("notify").after(of_another_flow).run(|length: usize, _| async move { Ok(length) });
//! }
//! # }
//! ```
//!
//! A handler takes what its dependencies give:
//!
//! ```compile_fail,E0631
//! # use laneway_flow::{Flow, OwnQueue, Steps};
//! # struct Example;
//! # impl Flow for Example {
//! #     const SLUG: &'static str = "example";
//! #     type Input = String;
//! #     type Queues = (OwnQueue,);
//! fn steps(&self, flow: &mut Steps<Self>) {
//!     let fetch = flow.step("fetch").run(|url: String, _| async move { Ok(url.len()) });
//!     flow.step("notify").after(&fetch).run(|length: String, _| async move { Ok(length) });
//! }
//! # }
//! ```
//!
//! A map goes over a step that gives an array:
//!
//! ```compile_fail,E0308
//! # use laneway_flow::{Flow, OwnQueue, Steps};
//! # struct Example;
//! # impl Flow for Example {
//! #     const SLUG: &'static str = "example";
//! #     type Input = String;
//! #     type Queues = (OwnQueue,);
//! fn steps(&self, flow: &mut Steps<Self>) {
//!     let fetch = flow.step("fetch").run(|url: String, _| async move { Ok(url.len()) });
//!     flow.map("each", &fetch).run(|one: usize, _| async move { Ok(one) });
//! }
//! # }
//! ```
//!
//! A step is routed to a queue of its flow:
//!
//! ```compile_fail,E0277
//! # use laneway_flow::{Flow, OwnQueue, Steps};
//! # laneway_flow::queues! { EmailWorker = "email_worker"; }
//! # struct Example;
//! # impl Flow for Example {
//! #     const SLUG: &'static str = "example";
//! #     type Input = String;
//! type Queues = (OwnQueue,);
//!
//! fn steps(&self, flow: &mut Steps<Self>) {
//!     flow.step("notify").queue(EmailWorker).run(|name: String, _| async move { Ok(name) });
//! }
//! # }
//! ```
//!
//! What may be skipped is an `Option` to those that come after it:
//!
//! ```compile_fail,E0631
//! # use laneway_flow::{Flow, OwnQueue, Skip, Steps};
//! # struct Example;
//! # impl Flow for Example {
//! #     const SLUG: &'static str = "example";
//! #     type Input = String;
//! #     type Queues = (OwnQueue,);
//! fn steps(&self, flow: &mut Steps<Self>) {
//!     let score = flow.step("score").exhausted(Skip).run(|text: String, _| async move { Ok(text.len()) });
//!     flow.step("report").after(&score).run(|score: usize, _| async move { Ok(score) });
//! }
//! # }
//! ```
//!
//! The steps themselves are in [`step`](crate::Step); what comes out is a [`Definition`] with a handler for each step.

use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::definition::{DefineError, Definition, Options, Route, StepDefinition, StepType};
use crate::handler::{Action, decode, decode_flow_input};
use crate::queue::{Queue, Queues};
use crate::step::{ArrayOf, MapOf, SingleOf, Step, StepBuilder, Sure};

/// A graph of steps, as a type.
pub trait Flow: Sized + Send + Sync + 'static {
    /// Its name in the database.
    const SLUG: &'static str;

    /// Where in the input the key of a run is: runs of one key go one after another, in the order in which they were started. Empty: no order.
    const KEY: &'static [&'static str] = &[];

    /// What a run is started with.
    type Input: Serialize + DeserializeOwned + Send + 'static;

    /// The queues that it uses. The first is where steps go that are routed nowhere else; [`OwnQueue`](crate::OwnQueue) has the flow's own name.
    type Queues: Queues;

    /// How often and how long tasks are tried, for steps that say nothing else.
    fn options() -> Options {
        Options::default()
    }

    /// Its steps, dependencies first.
    fn steps(&self, flow: &mut Steps<Self>);

    /// The flow with all of its steps, or all that is wrong with it.
    fn define(&self) -> Result<Defined<Self>, DefineError> {
        let mut steps = Steps::new();
        self.steps(&mut steps);
        steps.finish()
    }
}

/// Where a flow's steps are collected.
pub struct Steps<F> {
    definitions: Vec<StepDefinition>,
    actions: HashMap<String, Action>,
    flow: PhantomData<fn() -> F>,
}

impl<F> fmt::Debug for Steps<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.definitions.iter().map(|step| &step.slug)).finish()
    }
}

impl<F: Flow> Steps<F> {
    fn new() -> Self {
        Self { definitions: Vec::new(), actions: HashMap::new(), flow: PhantomData }
    }

    /// A step with one task. Its handler takes the run's input, or, with [`after`](StepBuilder::after), its dependencies' outputs.
    pub fn step(&mut self, slug: &str) -> StepBuilder<'_, F, F::Input, Sure, SingleOf> {
        StepBuilder::new(self, slug, StepType::Single, |task| decode_flow_input::<F>(task))
    }

    /// A step with one task whose handler gives an array, over which a map can go.
    pub fn array(&mut self, slug: &str) -> StepBuilder<'_, F, F::Input, Sure, ArrayOf> {
        StepBuilder::new(self, slug, StepType::Single, |task| decode_flow_input::<F>(task))
    }

    /// A step with a task for each element of an earlier step's output. Its own output is the array of theirs, in the elements' order.
    pub fn map<T, S>(&mut self, slug: &str, over: &Step<F, Vec<T>, S>) -> StepBuilder<'_, F, T, Sure, MapOf>
    where
        T: DeserializeOwned + 'static,
    {
        let mut builder =
            StepBuilder::new(self, slug, StepType::Map, |task| decode("the element", &task.input));
        builder.definition.depends_on.push(over.slug().to_owned());
        builder
    }

    /// A step with a task for each element of the run's input.
    pub fn map_input<T>(&mut self, slug: &str) -> StepBuilder<'_, F, T, Sure, MapOf>
    where
        F: Flow<Input = Vec<T>>,
        T: DeserializeOwned + 'static,
    {
        StepBuilder::new(self, slug, StepType::Map, |task| decode("the element", &task.input))
    }

    pub(crate) fn add(&mut self, mut definition: StepDefinition, action: Action) {
        if matches!(action, Action::Manual) {
            definition.queue = Route::Manual;
        }
        self.actions.insert(definition.slug.clone(), action);
        self.definitions.push(definition);
    }

    fn finish(self) -> Result<Defined<F>, DefineError> {
        let queues = F::Queues::names::<F>();
        let own = queues[0];
        let queue = (own != F::SLUG).then(|| own.to_owned());
        let key = F::KEY.iter().map(|part| (*part).to_owned()).collect();
        let definition = Definition {
            slug: F::SLUG.to_owned(),
            queue,
            key,
            options: F::options(),
            steps: self.definitions,
        };
        definition.check()?;
        let used = definition.queues();
        let unused = queues.iter().filter(|queue| !used.contains(queue));
        let problems: Vec<String> = unused
            .map(|queue| format!("no step goes to the queue {queue:?}: take it out of the flow's queues, or route a step to it"))
            .collect();
        if !problems.is_empty() {
            return Err(DefineError { flow: definition.slug, problems });
        }
        Ok(Defined { definition, actions: self.actions, flow: PhantomData })
    }
}

/// A flow with all of its steps and handlers: what a worker serves.
pub struct Defined<F> {
    pub(crate) definition: Definition,
    pub(crate) actions: HashMap<String, Action>,
    flow: PhantomData<fn() -> F>,
}

impl<F> Defined<F> {
    /// The flow as data.
    pub fn definition(&self) -> &Definition {
        &self.definition
    }
}

impl<F: Flow> Defined<F> {
    /// The name of one of its queues.
    pub fn queue_name<Q: Queue, At>(&self, _: Q) -> &'static str
    where
        F::Queues: crate::queue::Uses<Q, At>,
    {
        Q::name::<F>()
    }
}

impl<F> Clone for Defined<F> {
    fn clone(&self) -> Self {
        Self { definition: self.definition.clone(), actions: self.actions.clone(), flow: PhantomData }
    }
}

impl<F> fmt::Debug for Defined<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Defined").field("definition", &self.definition).finish_non_exhaustive()
    }
}
