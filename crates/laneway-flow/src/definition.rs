//! A flow as data: slugs, dependencies, queues and settings, without types and handlers.
//!
//! The DSL makes one of a [`Flow`](crate::Flow); a file of JSON is one as well. Either way [`Definition::check`] lists all that is wrong with it
//! before the database sees it, and [`Definition::shape`] is what the database compares with what it has.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::name;

/// How many steps a flow may have.
pub const STEPS_MAX: usize = 1_000;

/// A flow as data.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Definition {
    /// The flow's name.
    pub slug: String,
    /// Where its steps go that say nothing else; without one, a queue of the flow's own name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    /// Where in the input the key is that puts runs in a row, as the names on the way to it; empty for runs that need no order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub key: Vec<String>,
    /// What its steps inherit.
    #[serde(default, flatten)]
    pub options: Options,
    /// Its steps, dependencies first.
    pub steps: Vec<StepDefinition>,
}

/// How often and how long a task is tried. What is not said is the flow's, and then the database's default: 3 attempts, 5 s, 60 s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Options {
    /// How many times a task is tried in all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_attempts: Option<u32>,
    /// Seconds, doubled with every attempt: twice as many before the second, four times before the third.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_delay: Option<u32>,
    /// Seconds that an attempt may take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<u32>,
}

/// A step as data.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct StepDefinition {
    /// The step's name, unique in its flow.
    pub slug: String,
    /// One task, or one for each element.
    #[serde(default)]
    pub step_type: StepType,
    /// The steps whose outputs it takes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub depends_on: Vec<String>,
    /// Where its tasks go.
    #[serde(default, skip_serializing_if = "Route::is_inherited")]
    pub queue: Route,
    /// Attempts, delay and timeout, where they differ from the flow's.
    #[serde(default, flatten)]
    pub options: Options,
    /// Seconds between being ready and its message being visible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_delay: Option<u32>,
    /// What the input must contain.
    #[serde(default, rename = "if", skip_serializing_if = "Option::is_none")]
    pub required: Option<Value>,
    /// What the input must not contain.
    #[serde(default, rename = "ifNot", skip_serializing_if = "Option::is_none")]
    pub forbidden: Option<Value>,
    /// What to do when the conditions are not met.
    #[serde(default = "When::skip")]
    pub when_unmet: When,
    /// What to do when the last attempt has failed.
    #[serde(default)]
    pub when_exhausted: When,
}

/// One task, or one for each element of an array.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StepType {
    /// One task.
    #[default]
    Single,
    /// One task for each element; the output is the array of their outputs, in the order of the elements.
    Map,
}

impl StepType {
    pub(crate) fn sql(self) -> &'static str {
        match self {
            StepType::Single => "single",
            StepType::Map => "map",
        }
    }
}

/// Where a step's tasks go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Route {
    /// To the flow's queue.
    #[default]
    Inherited,
    /// To this queue.
    To(String),
    /// Nowhere: somebody completes them by hand.
    Manual,
}

impl Route {
    /// Whether it says nothing.
    pub fn is_inherited(&self) -> bool {
        *self == Route::Inherited
    }

    /// As the database writes it: nothing, a name, or `false`.
    pub fn sql(&self) -> Option<&str> {
        match self {
            Route::Inherited => None,
            Route::To(queue) => Some(queue),
            Route::Manual => Some(name::MANUAL),
        }
    }
}

impl Serialize for Route {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Route::Inherited => serializer.serialize_none(),
            Route::To(queue) => serializer.serialize_str(queue),
            Route::Manual => serializer.serialize_bool(false),
        }
    }
}

impl<'de> Deserialize<'de> for Route {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::Null => Ok(Route::Inherited),
            Value::Bool(false) => Ok(Route::Manual),
            Value::String(text) if text == name::MANUAL => Ok(Route::Manual),
            Value::String(queue) => Ok(Route::To(queue)),
            other => Err(serde::de::Error::custom(format!("a queue is a name, or false; not {other}"))),
        }
    }
}

/// What becomes of a step that will not run, or that has failed for good.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum When {
    /// The run fails.
    #[default]
    Fail,
    /// The step is skipped; what depends on it runs without its output.
    Skip,
    /// The step is skipped, and all that depends on it.
    SkipCascade,
}

impl When {
    fn skip() -> Self {
        When::Skip
    }

    pub(crate) fn sql(self) -> &'static str {
        match self {
            When::Fail => "fail",
            When::Skip => "skip",
            When::SkipCascade => "skip-cascade",
        }
    }
}

/// All that is wrong with a definition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DefineError {
    /// The flow.
    pub flow: String,
    /// Each thing that is wrong, and what would be right.
    pub problems: Vec<String>,
}

impl fmt::Display for DefineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the flow {:?} cannot be defined", self.flow)?;
        self.problems.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
    }
}

impl std::error::Error for DefineError {}

impl Definition {
    /// Reads a definition from JSON, sorts its steps so that dependencies come first, and lists all that is wrong with it.
    pub fn from_json(text: &str) -> Result<Self, DefineError> {
        let mut definition: Definition = serde_json::from_str(text).map_err(|error| DefineError {
            flow: String::new(),
            problems: vec![format!("this is no definition of a flow: {error}")],
        })?;
        definition.sort();
        definition.check()?;
        Ok(definition)
    }

    /// The queue of steps that say nothing.
    pub fn own_queue(&self) -> &str {
        self.queue.as_deref().unwrap_or(&self.slug)
    }

    /// The queue of a step; nothing for one that is completed by hand.
    pub fn queue_of<'a>(&'a self, step: &'a StepDefinition) -> Option<&'a str> {
        match &step.queue {
            Route::Inherited => Some(self.own_queue()),
            Route::To(queue) => Some(queue),
            Route::Manual => None,
        }
    }

    /// All queues that the flow uses, its own first. The flow's own is one of them even if every step goes elsewhere.
    pub fn queues(&self) -> Vec<&str> {
        let mut queues = vec![self.own_queue()];
        for queue in self.steps.iter().filter_map(|step| self.queue_of(step)) {
            if !queues.contains(&queue) {
                queues.push(queue);
            }
        }
        queues
    }

    /// The step of this name.
    pub fn step(&self, slug: &str) -> Option<&StepDefinition> {
        self.steps.iter().find(|step| step.slug == slug)
    }

    /// How long an attempt at this step may take.
    pub fn timeout_seconds(&self, step: &str) -> u32 {
        let own = self.step(step).and_then(|step| step.options.timeout);
        own.or(self.options.timeout).unwrap_or(TIMEOUT_DEFAULT)
    }

    /// Puts dependencies before dependents, keeping the order otherwise. What is in a cycle stays at the end, for `check` to find.
    fn sort(&mut self) {
        let (mut sorted, mut done) = (Vec::with_capacity(self.steps.len()), BTreeSet::new());
        let known: BTreeSet<String> = self.steps.iter().map(|step| step.slug.clone()).collect();
        let mut waiting = std::mem::take(&mut self.steps);
        loop {
            // What is unknown cannot be waited for.
            let is_ready = |step: &StepDefinition| {
                step.depends_on
                    .iter()
                    .all(|dependency| done.contains(dependency) || !known.contains(dependency))
            };
            let Some(place) = waiting.iter().position(is_ready) else { break };
            let step = waiting.remove(place);
            done.insert(step.slug.clone());
            sorted.push(step);
        }
        sorted.extend(waiting);
        self.steps = sorted;
    }

    /// Lists all that is wrong, not only the first.
    pub fn check(&self) -> Result<(), DefineError> {
        let mut problems = Vec::new();
        let mut note = |result: Result<(), name::BadName>| {
            if let Err(bad) = result {
                problems.push(bad.to_string());
            }
        };
        note(name::slug("flow", &self.slug));
        // A flow without a queue has one of its own name, which must then be fit for a queue.
        note(name::queue(self.own_queue()));
        for step in &self.steps {
            note(name::slug("step", &step.slug));
            if let Route::To(queue) = &step.queue {
                note(name::queue(queue));
            }
        }
        if self.steps.is_empty() {
            problems.push("it has no step: give it at least one".to_owned());
        }
        if self.steps.len() > STEPS_MAX {
            problems.push(format!("it has {} steps: at most {STEPS_MAX} are allowed", self.steps.len()));
        }
        problems.extend(self.problems_of_options("the flow", &self.options));
        problems.extend(self.problems_of_the_graph());
        problems.extend(self.steps.iter().flat_map(|step| self.problems_of_step(step)));
        if problems.is_empty() { Ok(()) } else { Err(DefineError { flow: self.slug.clone(), problems }) }
    }

    fn problems_of_the_graph(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut places = BTreeMap::new();
        for (place, step) in self.steps.iter().enumerate() {
            if places.insert(step.slug.as_str(), place).is_some() {
                problems
                    .push(format!("there are two steps called {:?}: names are unique in a flow", step.slug));
            }
        }
        for (place, step) in self.steps.iter().enumerate() {
            for dependency in &step.depends_on {
                match places.get(dependency.as_str()) {
                    None => problems.push(format!(
                        "step {:?} depends on {dependency:?}, which does not exist: there are {}",
                        step.slug,
                        list(self.steps.iter().map(|step| step.slug.as_str()))
                    )),
                    Some(&before) if before >= place => problems.push(format!(
                        "step {:?} depends on {dependency:?}, which depends on it or comes after it: steps cannot wait in a circle",
                        step.slug
                    )),
                    Some(_) => {}
                }
            }
        }
        problems
    }

    fn problems_of_step(&self, step: &StepDefinition) -> Vec<String> {
        let name = format!("step {:?}", step.slug);
        let mut problems = self.problems_of_options(&name, &step.options);
        if step.step_type == StepType::Map && step.depends_on.len() > 1 {
            problems.push(format!("{name} is a map over {} steps: one at the most", step.depends_on.len()));
        }
        let unique: BTreeSet<_> = step.depends_on.iter().collect();
        if unique.len() < step.depends_on.len() {
            problems.push(format!("{name} names a dependency twice: name it once"));
        }
        for (what, pattern) in [("if", &step.required), ("ifNot", &step.forbidden)] {
            if pattern.as_ref().is_some_and(|pattern| !pattern.is_object()) {
                problems.push(format!(
                    "{name} has a condition {what:?} that is no JSON object: patterns are objects"
                ));
            }
        }
        problems
    }

    fn problems_of_options(&self, name: &str, options: &Options) -> Vec<String> {
        let mut problems = Vec::new();
        let mut bounded = |what: &str, value: Option<u32>, least: u32| {
            if let Some(value) = value.filter(|value| !(least..=SECONDS_MAX).contains(value)) {
                problems.push(format!("{name} has {what} {value}: it must be from {least} to {SECONDS_MAX}"));
            }
        };
        bounded("maxAttempts", options.max_attempts, 1);
        bounded("baseDelay", options.base_delay, 0);
        bounded("timeout", options.timeout, 1);
        problems
    }

    /// What the database compares with what it has, and makes a new flow of.
    pub fn shape(&self) -> Value {
        let steps: Vec<Value> = self.steps.iter().map(StepDefinition::shape).collect();
        let mut shape = json!({ "steps": steps, "options": self.options });
        if let Some(queue) = &self.queue {
            shape["queue"] = json!(queue);
        }
        if !self.key.is_empty() {
            shape["keyPath"] = json!(self.key);
        }
        shape
    }
}

impl StepDefinition {
    fn shape(&self) -> Value {
        let pattern = |pattern: &Option<Value>| match pattern {
            Some(value) => json!({ "defined": true, "value": value }),
            None => json!({ "defined": false }),
        };
        let mut options = json!(self.options);
        if let Some(delay) = self.start_delay {
            options["startDelay"] = json!(delay);
        }
        let mut dependencies = self.depends_on.clone();
        dependencies.sort();
        let mut shape = json!({
            "slug": self.slug,
            "stepType": self.step_type.sql(),
            "dependencies": dependencies,
            "requiredInputPattern": pattern(&self.required),
            "forbiddenInputPattern": pattern(&self.forbidden),
            "whenUnmet": self.when_unmet.sql(),
            "whenExhausted": self.when_exhausted.sql(),
            "options": options,
        });
        if let Some(queue) = self.queue.sql() {
            shape["queue"] = json!(queue);
        }
        shape
    }
}

/// What `create_flow` takes when nothing is said.
const TIMEOUT_DEFAULT: u32 = 60;

/// A number of seconds, or attempts, beyond which it is a mistake: about three years.
const SECONDS_MAX: u32 = 100_000_000;

/// Names for an error text.
pub(crate) fn list<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.into_iter().collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str) -> String {
        Definition::from_json(text).unwrap_err().to_string()
    }

    #[test]
    fn the_queues_of_a_flow_are_its_own_and_those_of_its_steps() {
        let flow = Definition::from_json(
            r#"{"slug":"data_flow","queue":"data_processor","steps":[
                {"slug":"fetch"},{"slug":"notify","queue":"email_worker","dependsOn":["fetch"]},{"slug":"debug","queue":false}]}"#,
        )
        .expect("it is well-formed");
        assert_eq!(flow.queues(), ["data_processor", "email_worker"]);
        assert_eq!(flow.queue_of(flow.step("debug").expect("it is there")), None);
        let flow =
            Definition::from_json(r#"{"slug":"plain","steps":[{"slug":"a"}]}"#).expect("it is well-formed");
        assert_eq!(flow.queues(), ["plain"]);
    }

    #[test]
    fn all_that_is_wrong_is_said_at_once() {
        let words = problems(
            r#"{"slug":"1flow","queue":"Q","steps":[{"slug":"a","dependsOn":["nobody"],"queue":"no-queue"},
                {"slug":"a"},{"slug":"m","stepType":"map","dependsOn":["a","a"],"if":[1],"timeout":0}]}"#,
        );
        for part in [
            "\"1flow\"",
            "\"Q\"",
            "\"no-queue\"",
            "\"nobody\", which does not exist: there are a, a, m",
            "two steps called \"a\"",
            "map over 2 steps",
            "names a dependency twice",
            "no JSON object",
            "timeout 0",
        ] {
            assert!(words.contains(part), "{part} is not in:\n{words}");
        }
        assert!(problems(r#"{"slug":"Upper","steps":[{"slug":"a"}]}"#).contains("queue \"Upper\""));
        assert!(problems(r#"{"slug":"f","steps":[]}"#).contains("no step"));
        assert!(problems(r#"{"slug":"f","steps":[{"slug":"a","queu":"x"}]}"#).contains("queu"));
    }

    #[test]
    fn steps_may_come_in_any_order_and_not_in_a_circle() {
        let flow = Definition::from_json(
            r#"{"slug":"f","steps":[{"slug":"c","dependsOn":["b"]},{"slug":"b","dependsOn":["a"]},{"slug":"a"}]}"#,
        )
        .expect("it is well-formed");
        let order: Vec<_> = flow.steps.iter().map(|step| step.slug.as_str()).collect();
        assert_eq!(order, ["a", "b", "c"]);
        let words = problems(
            r#"{"slug":"f","steps":[{"slug":"a","dependsOn":["b"]},{"slug":"b","dependsOn":["a"]}]}"#,
        );
        assert!(words.contains("in a circle"), "{words}");
    }

    #[test]
    fn a_definition_survives_json() {
        let text = r#"{"slug":"f","steps":[{"slug":"a","queue":false,"if":{"x":1},"whenExhausted":"skip-cascade","startDelay":3}]}"#;
        let flow = Definition::from_json(text).expect("it is well-formed");
        let again = serde_json::to_string(&flow).expect("it is JSON");
        assert_eq!(Definition::from_json(&again).expect("it is still one"), flow);
        assert_eq!(flow.shape()["steps"][0]["queue"], "false");
    }
}
