//! The effective configuration: what every key is, and which layer said so. `layers` makes it, `section` reads from it.

use hocon::{Config as Tree, HoconValue, ScalarType};

use crate::{layers::Layer, mask, problem::ReadError, section::Section};

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
