//! Steps: what a [`Steps`] hands out, and what is said about one before it gets its handler.
//!
//! A [`Step`] is the name of a step together with the type of what it gives. A step that comes after others takes the type of its handler's
//! input from them; what it may be that it gives nothing (it can be skipped) is in the type as well.

use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::value::RawValue;
use sqlx::PgConnection;

use crate::definition::{Route, StepDefinition, StepType, When};
use crate::flow::{Flow, Steps};
use crate::handler::{Action, Context, Failure, Task, decode, encode};
use crate::queue::{Queue, Uses};

/// A step of the flow `F` that gives `Out`. `S` says whether it can be skipped.
pub struct Step<F, Out, S = Sure> {
    slug: Arc<str>,
    types: Types<F, Out, S>,
}

/// Names types without having values of them: a step is `Send` whatever it gives.
type Types<F, Out, S> = PhantomData<fn() -> (F, Out, S)>;

impl<F, Out, S> Step<F, Out, S> {
    fn new(slug: &str) -> Self {
        Self { slug: slug.into(), types: PhantomData }
    }

    /// Its name.
    pub fn slug(&self) -> &str {
        &self.slug
    }
}

impl<F, Out, S> Clone for Step<F, Out, S> {
    fn clone(&self) -> Self {
        Self { slug: self.slug.clone(), types: PhantomData }
    }
}

impl<F, Out, S> fmt::Debug for Step<F, Out, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Step({:?})", self.slug)
    }
}

/// Said of a step that never is skipped while what depends on it runs.
#[derive(Debug)]
pub struct Sure;

/// Said of a step that may be skipped, while what depends on it runs without its output.
#[derive(Debug)]
pub struct Maybe;

/// Whether a step gives its output for sure: [`Sure`] or [`Maybe`].
pub trait Certainty: 'static {
    /// What those that come after a step get of its output.
    type Of<T>;

    /// Takes the output out of what the database gave; `None` where the step was skipped.
    fn receive<T: DeserializeOwned>(step: &str, output: Option<&RawValue>) -> Result<Self::Of<T>, Failure>;
}

impl Certainty for Sure {
    type Of<T> = T;

    fn receive<T: DeserializeOwned>(step: &str, output: Option<&RawValue>) -> Result<T, Failure> {
        match output {
            Some(output) => decode(&format!("the output of {step}"), output),
            None => Err(Failure::fatal(format!("the output of {step} is missing"))),
        }
    }
}

impl Certainty for Maybe {
    type Of<T> = Option<T>;

    fn receive<T: DeserializeOwned>(step: &str, output: Option<&RawValue>) -> Result<Option<T>, Failure> {
        output.map(|output| decode(&format!("the output of {step}"), output)).transpose()
    }
}

/// The run fails.
#[derive(Clone, Copy, Debug)]
pub struct Fail;

/// The step is skipped, and what depends on it runs without its output.
#[derive(Clone, Copy, Debug)]
pub struct Skip;

/// The step is skipped, and all that depends on it.
#[derive(Clone, Copy, Debug)]
pub struct SkipCascade;

/// What becomes of a step whose conditions are not met or whose attempts are used up: [`Fail`], [`Skip`] or [`SkipCascade`].
pub trait Then {
    /// Whether the step is still sure afterwards, if it was `S` before.
    type Leaves<S>;

    /// The same as data.
    const WHEN: When;
}

impl Then for Fail {
    type Leaves<S> = S;
    const WHEN: When = When::Fail;
}

impl Then for Skip {
    type Leaves<S> = Maybe;
    const WHEN: When = When::Skip;
}

impl Then for SkipCascade {
    type Leaves<S> = S;
    const WHEN: When = When::SkipCascade;
}

/// What a handler gives and what the step gives: the same, an array, or an array of what the handler gives.
pub trait Kind {
    /// What the handler gives.
    type Given<T>;
    /// What the step gives.
    type Out<T>;
}

/// A step with one task.
#[derive(Debug)]
pub struct SingleOf;

/// A step with one task that gives an array.
#[derive(Debug)]
pub struct ArrayOf;

/// A step with a task for each element.
#[derive(Debug)]
pub struct MapOf;

impl Kind for SingleOf {
    type Given<T> = T;
    type Out<T> = T;
}

impl Kind for ArrayOf {
    type Given<T> = Vec<T>;
    type Out<T> = Vec<T>;
}

impl Kind for MapOf {
    type Given<T> = T;
    type Out<T> = Vec<T>;
}

/// The outputs of dependencies, as the database gives them.
pub type Outputs<'a> = HashMap<&'a str, &'a RawValue>;

/// Steps that another one can come after: `&step`, or a tuple of them.
#[diagnostic::on_unimplemented(
    message = "these are no steps of the flow `{F}`",
    note = "give the value that a step of this flow gave back, as `&step`, or a tuple of up to eight"
)]
pub trait After<F> {
    /// What the handler of the step gets of them.
    type Input;

    /// Their names.
    fn slugs(&self) -> Vec<String>;

    /// Takes their outputs out of what the database gave.
    fn receive(slugs: &[String], outputs: &Outputs<'_>) -> Result<Self::Input, Failure>;
}

impl<F, T: DeserializeOwned, S: Certainty> After<F> for &Step<F, T, S> {
    type Input = S::Of<T>;

    fn slugs(&self) -> Vec<String> {
        vec![self.slug().to_owned()]
    }

    fn receive(slugs: &[String], outputs: &Outputs<'_>) -> Result<Self::Input, Failure> {
        S::receive::<T>(&slugs[0], outputs.get(slugs[0].as_str()).copied())
    }
}

macro_rules! after_tuples {
    ($($($type:ident $certainty:ident $place:tt),+;)+) => {
        $(
            impl<F, $($type: DeserializeOwned, $certainty: Certainty),+> After<F> for ($(&Step<F, $type, $certainty>,)+) {
                type Input = ($($certainty::Of<$type>,)+);

                fn slugs(&self) -> Vec<String> {
                    vec![$(self.$place.slug().to_owned()),+]
                }

                fn receive(slugs: &[String], outputs: &Outputs<'_>) -> Result<Self::Input, Failure> {
                    Ok(($($certainty::receive::<$type>(&slugs[$place], outputs.get(slugs[$place].as_str()).copied())?,)+))
                }
            }
        )+
    };
}

after_tuples! {
    A AS 0;
    A AS 0, B BS 1;
    A AS 0, B BS 1, C CS 2;
    A AS 0, B BS 1, C CS 2, D DS 3;
    A AS 0, B BS 1, C CS 2, D DS 3, E ES 4;
    A AS 0, B BS 1, C CS 2, D DS 3, E ES 4, G GS 5;
    A AS 0, B BS 1, C CS 2, D DS 3, E ES 4, G GS 5, H HS 6;
    A AS 0, B BS 1, C CS 2, D DS 3, E ES 4, G GS 5, H HS 6, I IS 7;
}

type Decoder<In> = Box<dyn Fn(&Task) -> Result<In, Failure> + Send + Sync>;

/// A step that has no handler yet.
#[must_use = "a step is added by `run`, `commit` or `manual`"]
pub struct StepBuilder<'a, F, In, S, K> {
    steps: &'a mut Steps<F>,
    pub(crate) definition: StepDefinition,
    decoder: Decoder<In>,
    types: PhantomData<fn() -> (S, K)>,
}

impl<F, In, S, K> fmt::Debug for StepBuilder<'_, F, In, S, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepBuilder").field("definition", &self.definition).finish_non_exhaustive()
    }
}

impl<'a, F: Flow, In: 'static, S, K> StepBuilder<'a, F, In, S, K> {
    pub(crate) fn new(
        steps: &'a mut Steps<F>,
        slug: &str,
        step_type: StepType,
        decoder: impl Fn(&Task) -> Result<In, Failure> + Send + Sync + 'static,
    ) -> Self {
        // What the original writes for steps that say nothing.
        let definition = StepDefinition {
            slug: slug.to_owned(),
            step_type,
            when_unmet: When::Skip,
            ..StepDefinition::default()
        };
        Self { steps, definition, decoder: Box::new(decoder), types: PhantomData }
    }

    fn retyped<Now, Sureness>(self, decoder: Decoder<Now>) -> StepBuilder<'a, F, Now, Sureness, K> {
        StepBuilder { steps: self.steps, definition: self.definition, decoder, types: PhantomData }
    }

    fn certainty<Sureness>(mut self) -> StepBuilder<'a, F, In, Sureness, K> {
        let decoder = std::mem::replace(&mut self.decoder, Box::new(|_| Err(Failure::fatal("moved"))));
        self.retyped(decoder)
    }

    /// Routes the step's tasks to a queue of the flow.
    pub fn queue<Q: Queue, At>(mut self, _: Q) -> Self
    where
        F::Queues: Uses<Q, At>,
    {
        self.definition.queue = Route::To(Q::name::<F>().to_owned());
        self
    }

    /// How many times a task is tried in all.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.definition.options.max_attempts = Some(attempts);
        self
    }

    /// Doubled with every attempt: the second waits for twice as long, the third for four times. Whole seconds, rounded up.
    pub fn base_delay(mut self, delay: Duration) -> Self {
        self.definition.options.base_delay = Some(seconds(delay));
        self
    }

    /// How long an attempt may take. Whole seconds, rounded up.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.definition.options.timeout = Some(seconds(limit));
        self
    }

    /// How long the step waits after it has become ready. Whole seconds, rounded up.
    pub fn start_delay(mut self, delay: Duration) -> Self {
        self.definition.start_delay = Some(seconds(delay));
        self
    }

    /// Runs the step only where its input contains this JSON object: the run's input for a root, the dependencies' outputs by name otherwise.
    pub fn when<T: Then>(mut self, pattern: Value, otherwise: T) -> StepBuilder<'a, F, In, T::Leaves<S>, K> {
        let _ = otherwise;
        self.definition.required = Some(pattern);
        self.definition.when_unmet = T::WHEN;
        self.certainty()
    }

    /// Runs the step only where its input does not contain this JSON object.
    pub fn unless<T: Then>(
        mut self,
        pattern: Value,
        otherwise: T,
    ) -> StepBuilder<'a, F, In, T::Leaves<S>, K> {
        let _ = otherwise;
        self.definition.forbidden = Some(pattern);
        self.definition.when_unmet = T::WHEN;
        self.certainty()
    }

    /// What happens when the last attempt has failed. Without this the run fails.
    pub fn exhausted<T: Then>(mut self, then: T) -> StepBuilder<'a, F, In, T::Leaves<S>, K> {
        let _ = then;
        self.definition.when_exhausted = T::WHEN;
        self.certainty()
    }

    fn add<Out>(self, action: Action) -> Step<F, Out, S> {
        let step = Step::new(&self.definition.slug);
        self.steps.add(self.definition, action);
        step
    }
}

impl<'a, F: Flow, In: 'static, S, K: Kind> StepBuilder<'a, F, In, S, K> {
    /// Adds the step with its handler.
    pub fn run<T, H, R>(mut self, handler: H) -> Step<F, K::Out<T>, S>
    where
        H: Fn(In, Context<F>) -> R + Send + Sync + 'static,
        R: Future<Output = Result<K::Given<T>, Failure>> + Send + 'static,
        K::Given<T>: Serialize + Send,
    {
        let decoder = std::mem::replace(&mut self.decoder, Box::new(|_| Err(Failure::fatal("moved"))));
        let action = move |task: Arc<Task>| -> BoxFuture<'static, _> {
            match decoder(&task) {
                Err(failure) => Box::pin(std::future::ready(Err(failure))),
                Ok(input) => {
                    let answer = handler(input, Context::new(task));
                    Box::pin(async move { encode(&answer.await?) })
                }
            }
        };
        self.add(Action::Plain(Arc::new(action)))
    }

    /// Adds the step with a handler that runs inside the transaction that completes the task: what it writes there is written exactly
    /// once, together with the completion, or not at all.
    ///
    /// ```
    /// # use laneway_flow::{Context, Failure, Flow, OwnQueue, Steps};
    /// # struct Billing;
    /// # impl Flow for Billing {
    /// #     const SLUG: &'static str = "billing";
    /// #     type Input = i64;
    /// #     type Queues = (OwnQueue,);
    /// fn steps(&self, flow: &mut Steps<Self>) {
    ///     flow.step("book").commit(|cents, connection, _| {
    ///         Box::pin(async move {
    ///             let book = sqlx::query("INSERT INTO bookings (cents) VALUES ($1)").bind(cents);
    ///             Ok(book.execute(connection).await?.rows_affected())
    ///         })
    ///     });
    /// }
    /// # }
    /// ```
    pub fn commit<T, H>(mut self, handler: H) -> Step<F, K::Out<T>, S>
    where
        H: for<'c> Fn(In, &'c mut PgConnection, Context<F>) -> BoxFuture<'c, Result<K::Given<T>, Failure>>
            + Send
            + Sync
            + 'static,
        K::Given<T>: Serialize + Send + 'static,
    {
        let decoder = std::mem::replace(&mut self.decoder, Box::new(|_| Err(Failure::fatal("moved"))));
        let action = into_committed(move |task: Arc<Task>, connection| match decoder(&task) {
            Err(failure) => Box::pin(std::future::ready(Err(failure))),
            Ok(input) => {
                let answer = handler(input, connection, Context::new(task));
                Box::pin(async move { encode(&answer.await?) })
            }
        });
        self.add(action)
    }

    /// Adds the step without a handler: it has no queue, and somebody completes it by hand, with what the type says.
    pub fn manual<T>(self) -> Step<F, K::Out<T>, S>
    where
        K::Given<T>: Serialize,
    {
        self.add(Action::Manual)
    }
}

impl<'a, F: Flow, S> StepBuilder<'a, F, F::Input, S, SingleOf> {
    /// Makes the step wait for others, whose outputs its handler takes instead of the run's input.
    pub fn after<D: After<F>>(self, steps: D) -> StepBuilder<'a, F, D::Input, S, SingleOf>
    where
        D::Input: 'static,
    {
        after(self, steps)
    }
}

impl<'a, F: Flow, S> StepBuilder<'a, F, F::Input, S, ArrayOf> {
    /// Makes the step wait for others, whose outputs its handler takes instead of the run's input.
    pub fn after<D: After<F>>(self, steps: D) -> StepBuilder<'a, F, D::Input, S, ArrayOf>
    where
        D::Input: 'static,
    {
        after(self, steps)
    }
}

fn after<'a, F: Flow, S, K, D: After<F>>(
    mut builder: StepBuilder<'a, F, F::Input, S, K>,
    steps: D,
) -> StepBuilder<'a, F, D::Input, S, K>
where
    D::Input: 'static,
{
    let slugs = steps.slugs();
    builder.definition.depends_on = slugs.clone();
    builder.retyped(Box::new(move |task: &Task| {
        let outputs: Outputs<'_> = serde_json::from_str(task.input.get())
            .map_err(|error| Failure::fatal(format!("the dependencies' outputs cannot be read: {error}")))?;
        D::receive(&slugs, &outputs)
    }))
}

/// Tells the compiler that the closure works for connections of every lifetime.
fn into_committed<C>(run: C) -> Action
where
    C: for<'c> Fn(Arc<Task>, &'c mut PgConnection) -> BoxFuture<'c, crate::handler::Answer>
        + Send
        + Sync
        + 'static,
{
    Action::Committed(Arc::new(run))
}

/// Whole seconds, as the database counts; a part of one is one.
fn seconds(duration: Duration) -> u32 {
    let whole = duration.as_secs() + u64::from(duration.subsec_nanos() > 0);
    u32::try_from(whole).unwrap_or(u32::MAX)
}
