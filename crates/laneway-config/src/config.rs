//! The effective configuration: what every key is, and which layer said so. `layers` makes it, `section` reads from it.

use hocon::{Config as Tree, HoconValue, ScalarType};

use crate::{
    layers::{Layer, Layers, variable_of},
    mask,
    problem::{ReadError, ReadProblem},
    section::{NEAR, Section},
};

/// Layers, merged and resolved.
pub struct Config {
    layers: Vec<Layer>,
    /// For each layer, what it and those below it come to.
    below: Vec<Tree>,
    effective: Tree,
}

/// One effective value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effective {
    /// The whole path of its key.
    pub path: String,
    /// The value as it may be shown: secrets are hidden.
    pub value: String,
    /// The name of the layer that it came from.
    pub origin: String,
}

/// A configuration without the variables of the environment that name no setting, and what was read from it.
#[derive(Debug)]
pub struct Settled<T> {
    /// What is left.
    pub config: Config,
    /// What was left out: a problem for each variable, with the setting that was probably meant.
    pub strays: Vec<ReadProblem>,
    /// What was read, or all that is wrong with what is left.
    pub read: Result<T, ReadError>,
}

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.effective("")).finish()
    }
}

/// How a layer mentions a path.
enum Mention {
    Not,
    Plainly,
    /// By a substitution, which may have come to nothing.
    Indirectly,
}

impl Config {
    pub(crate) fn new(layers: Vec<Layer>, below: Vec<Tree>, effective: Tree) -> Self {
        Config { layers, below, effective }
    }

    /// Reads the section at a path into a value of the program's own type; `""` is the whole document. Everything that is wrong is said at once, keys that
    /// `read` did not ask for included.
    pub fn read<T>(&self, root: &str, read: impl FnOnce(&mut Section<'_>) -> T) -> Result<T, ReadError> {
        let mut section = Section::at_root(self, root);
        let value = read(&mut section);
        let problems = section.finish();
        if problems.is_empty() { Ok(value) } else { Err(ReadError { problems }) }
    }

    /// Reads like [`read`](Config::read), but leaves out each variable of the environment that names no setting. A file is written for one program, and
    /// what it does not know in there is a mistake; the environment is everybody's, and a variable that only begins alike need not be meant for it.
    pub fn settle<T>(mut self, root: &str, read: impl Fn(&mut Section<'_>) -> T) -> Settled<T> {
        let mut strays: Vec<(Layer, Option<Vec<String>>)> = Vec::new();
        loop {
            let outcome = self.read(root, &read);
            let problems = outcome.as_ref().err().map_or(&[][..], |error| &error.problems);
            let problem_of =
                |layer: &Layer| problems.iter().find(|problem| problem.strays.contains(&layer.name));
            let (out, kept): (Vec<Layer>, Vec<Layer>) =
                self.layers.iter().cloned().partition(|layer| problem_of(layer).is_some());
            // What other layers take from a stray by a substitution makes it none.
            let Some(left) = (!out.is_empty()).then(|| Layers::of(kept).load().ok()).flatten() else {
                let strays = strays.iter().map(|(layer, near)| self.stray(layer, near.as_deref())).collect();
                return Settled { config: self, strays, read: outcome };
            };
            strays.extend(out.into_iter().map(|layer| {
                let near = problem_of(&layer).and_then(|problem| problem.near.clone());
                (layer, near)
            }));
            self = left;
        }
    }

    fn stray(&self, layer: &Layer, near: Option<&[String]>) -> ReadProblem {
        let path = layer.variable.as_deref().unwrap_or_default();
        // A known key beside the unknown one is what was meant; a variable that went another way is compared with all settings.
        let beside = near.filter(|near| near.len() == path.len()).and_then(variable_of);
        let what = match beside.or_else(|| self.nearest_variable(path)) {
            Some(near) => format!("no setting has this name, and it is left out; did you mean {near}?"),
            None => "no setting has this name, and it is left out".to_owned(),
        };
        ReadProblem::new(joined(path), None, Some(layer.name.clone()), what)
    }

    /// The variable of the setting that was probably meant.
    fn nearest_variable(&self, path: &[String]) -> Option<String> {
        let plain = |path: &[String]| path.iter().skip(1).flat_map(|part| part.chars()).collect::<String>();
        let plain = |path: &[String]| plain(path).to_lowercase().replace(['_', '-'], "");
        let wanted = plain(path);
        let settings = self.effective("").into_iter().map(|setting| parts(&setting.path));
        let named = settings.filter_map(|setting| {
            let distance = strsim::damerau_levenshtein(&plain(&setting), &wanted);
            Some((distance, variable_of(&setting)?))
        });
        let (distance, variable) = named.min()?;
        (distance <= NEAR.min(wanted.len() / 2)).then_some(variable)
    }

    /// The layers of variables by which alone there is something at this path: each sets it, or what is below it.
    pub(crate) fn variables_alone_at(&self, path: &[String]) -> Vec<String> {
        let mut variables = Vec::new();
        for layer in self.layers.iter().filter(|layer| layer.speaks_of(path)) {
            match &layer.variable {
                Some(set) if set.starts_with(path) => variables.push(layer.name.clone()),
                _ => return Vec::new(),
            }
        }
        variables
    }

    /// The layers of variables that set something below this path, over all that sets what is at it.
    pub(crate) fn variables_below(&self, path: &[String]) -> Vec<String> {
        let speaking = self.layers.iter().rev().filter(|layer| layer.speaks_of(path));
        let is_below = |layer: &&Layer| {
            layer.variable.as_ref().is_some_and(|set| set.len() > path.len() && set.starts_with(path))
        };
        speaking.take_while(is_below).map(|layer| layer.name.clone()).collect()
    }

    /// The layer that the value at this path came from, if there is one.
    pub fn origin(&self, path: &str) -> Option<String> {
        self.origin_of(&parts(path)).map(str::to_owned)
    }

    /// All values below a path, each with its origin, in the order of the merged document.
    pub fn effective(&self, root: &str) -> Vec<Effective> {
        let mut found = Vec::new();
        let mut path = if root.is_empty() { Vec::new() } else { parts(root) };
        if path.is_empty() {
            for key in self.effective.keys() {
                path.push(key.to_owned());
                self.collect(&mut path, &mut found);
                path.pop();
            }
        } else {
            self.collect(&mut path, &mut found);
        }
        found
    }

    fn collect(&self, path: &mut Vec<String>, found: &mut Vec<Effective>) {
        match self.value(path) {
            Some(HoconValue::Object(fields)) if !fields.is_empty() => {
                for key in fields.keys() {
                    path.push(key.clone());
                    self.collect(path, found);
                    path.pop();
                }
            }
            Some(value) => {
                let shown = mask::shown(path.last().map_or("", String::as_str), &render(value));
                let origin = self.origin_of(path).unwrap_or("?").to_owned();
                found.push(Effective { path: joined(path), value: shown, origin });
            }
            None => {}
        }
    }

    /// The effective value at a path.
    pub(crate) fn value(&self, path: &[String]) -> Option<&HoconValue> {
        at(&self.effective, path)
    }

    /// The keys at the top.
    pub(crate) fn top_keys(&self) -> Vec<&str> {
        self.effective.keys()
    }

    pub(crate) fn origin_of(&self, path: &[String]) -> Option<&str> {
        self.value(path)?;
        let speaks = |place: &usize| {
            let layer = &self.layers[*place];
            match (mention(&layer.alone, path), mention(&layer.tree, path)) {
                (Mention::Plainly, _) => true,
                // One that came to nothing left the value as it was below.
                (Mention::Indirectly, _) | (_, Mention::Indirectly) => {
                    *place == 0 || at(&self.below[*place], path) != at(&self.below[*place - 1], path)
                }
                _ => false,
            }
        };
        let place = (0..self.layers.len()).rev().find(speaks)?;
        Some(&self.layers[place].name)
    }
}

impl Layer {
    fn speaks_of(&self, path: &[String]) -> bool {
        [&self.alone, &self.tree].into_iter().any(|tree| !matches!(mention(tree, path), Mention::Not))
    }
}

pub(crate) fn at<'a>(tree: &'a Tree, path: &[String]) -> Option<&'a HoconValue> {
    let (first, rest) = path.split_first()?;
    let mut value = tree.get(&quoted(first))?;
    for part in rest {
        value = value.as_object()?.get(part)?;
    }
    Some(value)
}

fn mention(tree: &Tree, path: &[String]) -> Mention {
    for end in 1..=path.len() {
        match at(tree, &path[..end]) {
            None => return Mention::Not,
            Some(HoconValue::Object(_)) => {}
            // Something above the path that is no object has nothing to say about it.
            Some(HoconValue::Array(_) | HoconValue::Scalar(_)) if end < path.len() => return Mention::Not,
            Some(HoconValue::Array(items)) if !items.iter().any(is_open) => return Mention::Plainly,
            Some(HoconValue::Scalar(_)) => return Mention::Plainly,
            Some(_) => return Mention::Indirectly,
        }
    }
    Mention::Plainly
}

/// Whether there is a substitution in it.
fn is_open(value: &HoconValue) -> bool {
    match value {
        HoconValue::Object(fields) => fields.values().any(is_open),
        HoconValue::Array(items) => items.iter().any(is_open),
        HoconValue::Scalar(_) => false,
        _ => true,
    }
}

/// The parts of a path; a part in quotes may hold dots.
pub(crate) fn parts(path: &str) -> Vec<String> {
    let (mut parts, mut part, mut in_quotes) = (Vec::new(), String::new(), false);
    for char in path.chars() {
        match char {
            '"' => in_quotes = !in_quotes,
            '.' if !in_quotes => parts.push(std::mem::take(&mut part)),
            char => part.push(char),
        }
    }
    parts.push(part);
    parts
}

/// A part as it is written in a path.
pub(crate) fn written(part: &str) -> String {
    let plain = |char: char| char.is_alphanumeric() || char == '-' || char == '_';
    if !part.is_empty() && part.chars().all(plain) { part.to_owned() } else { format!("\"{part}\"") }
}

fn quoted(part: &str) -> String {
    format!("\"{}\"", part.replace('\\', "\\\\").replace('"', "\\\""))
}

pub(crate) fn joined(path: &[String]) -> String {
    path.iter().map(|part| written(part)).collect::<Vec<_>>().join(".")
}

/// A value for a person, on one line.
pub(crate) fn render(value: &HoconValue) -> String {
    let text = match value {
        HoconValue::Object(fields) => {
            let field = |(key, value): (&String, &HoconValue)| {
                format!("{} = {}", written(key), mask::shown(key, &render(value)))
            };
            format!("{{{}}}", fields.iter().map(field).collect::<Vec<_>>().join(", "))
        }
        HoconValue::Array(items) => {
            format!("[{}]", items.iter().map(render).collect::<Vec<_>>().join(", "))
        }
        HoconValue::Scalar(scalar) if scalar.value_type == ScalarType::String => format!("{:?}", scalar.raw),
        HoconValue::Scalar(scalar) => scalar.raw.clone(),
        _ => "(a substitution)".to_owned(),
    };
    shortened(text)
}

/// Long values do not help whoever reads an error.
fn shortened(text: String) -> String {
    const LONGEST: usize = 160;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
