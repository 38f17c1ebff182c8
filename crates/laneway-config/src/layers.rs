//! What lies over what. Texts and files come in from a program; a [`Config`] goes out, or all that is wrong with them.

use std::path::{Path, PathBuf};

use hocon::{Config as Tree, HoconError, HoconValue, ParseOptions, ResolveOptions};
use indexmap::IndexMap;

use crate::{
    Config,
    config::{at, parts},
    guard::{self, BYTES_MAX},
    problem::{LoadError, LoadProblem},
};

/// A layer, parsed.
#[derive(Clone)]
pub(crate) struct Layer {
    pub(crate) name: String,
    /// What a variable of the environment sets.
    pub(crate) variable: Option<Vec<String>>,
    /// With its substitutions still in it.
    pub(crate) tree: Tree,
    /// The same, with what can be resolved from the layer itself and the environment.
    pub(crate) alone: Tree,
}

impl Layer {
    fn new(name: impl Into<String>, tree: Tree) -> Self {
        let partly = ResolveOptions::defaults().with_allow_unresolved(true);
        let alone = tree.resolve(partly).unwrap_or_else(|_| tree.clone());
        Layer { name: name.into(), variable: None, tree, alone }
    }
}

/// Layers of configuration, the lowest first. What is wrong with them is said by [`load`](Layers::load), all of it.
#[derive(Default)]
pub struct Layers {
    layers: Vec<Layer>,
    problems: Vec<LoadProblem>,
}

impl std::fmt::Debug for Layers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.layers.iter().map(|layer| &layer.name)).finish()
    }
}

impl Layers {
    /// None yet.
    pub fn new() -> Self {
        Layers::default()
    }

    /// Puts a text on top. The name is what messages call it.
    pub fn text(self, name: &str, text: &str) -> Self {
        self.parsed(name, text, None)
    }

    /// Puts a part of a text on top, under another path; its substitutions are its own affair: `mounted("reference.conf", text, "laneway.events", "sss-events.engine")`.
    /// `""` is the whole document, on either side. A part that is not there is a problem.
    pub fn mounted(mut self, name: &str, text: &str, from: &str, to: &str) -> Self {
        let before = self.layers.len();
        self = self.text(name, text);
        if let Some(layer) = self.layers.get_mut(before) {
            match mount(&layer.alone, from, to) {
                Ok(tree) => *layer = Layer::new(name, tree),
                Err(what) => {
                    self.layers.truncate(before);
                    self.problems.push(LoadProblem { layer: name.to_owned(), position: None, what });
                }
            }
        }
        self
    }

    /// Puts a file on top. One that cannot be read is a problem.
    pub fn file(mut self, path: impl AsRef<Path>) -> Self {
        let (path, name) = (path.as_ref(), path.as_ref().display().to_string());
        match guard::read(path) {
            Ok(text) => self.parsed(&name, &text, Some(path.parent().unwrap_or(Path::new(".")))),
            Err(what) => {
                self.problems.push(LoadProblem { layer: name, position: None, what });
                self
            }
        }
    }

    /// Puts a file on top if there is one.
    pub fn file_if_present(self, path: impl AsRef<Path>) -> Self {
        if path.as_ref().exists() { self.file(path) } else { self }
    }

    /// Puts variables on top whose names begin with the prefix and an underscore. `_` stands for a dot, `__` for a hyphen and `___` for
    /// an underscore; the prefix is the first part of the path. Values are HOCON, or plain text where they are not. Those that name no setting are unknown keys
    /// like any others, unless the program reads with [`Config::settle`].
    pub fn environment(self, prefix: &str, variables: impl IntoIterator<Item = (String, String)>) -> Self {
        let ours = |(name, _): &(String, String)| {
            name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('_') && !rest.ends_with('_'))
        };
        let mut variables: Vec<_> = variables.into_iter().filter(ours).collect();
        variables.sort();
        let put = |layers: Layers, (name, value): (String, String)| {
            let path = path_of(&name);
            let mut layers = layers.value(format!("${name}"), &path, &value);
            if let Some(layer) = layers.layers.last_mut() {
                layer.variable = Some(parts(&path));
            }
            layers
        };
        variables.into_iter().fold(self, put)
    }

    /// Puts one value on top, as a flag does. The value is HOCON, or plain text where it is not.
    pub fn set(self, path: &str, value: &str) -> Self {
        self.value(format!("--set {path}"), path, value)
    }

    /// The effective configuration, with substitutions resolved.
    pub fn load(mut self) -> Result<Config, LoadError> {
        if !self.problems.is_empty() {
            return Err(LoadError { problems: self.problems });
        }
        let mut below: Vec<Tree> = Vec::new();
        for layer in &self.layers {
            let merged =
                below.last().map_or_else(|| layer.tree.clone(), |under| layer.tree.with_fallback(under));
            below.push(merged);
        }
        let Some(top) = below.last() else {
            return Ok(Config::new(Vec::new(), Vec::new(), Tree::new(IndexMap::new())));
        };
        match top.resolve(ResolveOptions::defaults()) {
            Ok(effective) => {
                let partly = ResolveOptions::defaults().with_allow_unresolved(true);
                let resolve = |tree: &Tree| tree.resolve(partly.clone()).unwrap_or_else(|_| tree.clone());
                Ok(Config::new(self.layers, below.iter().map(resolve).collect(), effective))
            }
            Err(error) => {
                let name = self.layers.last().map_or_else(String::new, |layer| layer.name.clone());
                self.problems.push(problem(&name, &error));
                Err(LoadError { problems: self.problems })
            }
        }
    }

    /// Layers that were loaded once, or some of them.
    pub(crate) fn of(layers: Vec<Layer>) -> Self {
        Layers { layers, problems: Vec::new() }
    }

    fn parsed(mut self, name: &str, text: &str, base: Option<&Path>) -> Self {
        match parse(name, text, base) {
            Ok(tree) => self.layers.push(Layer::new(name, tree)),
            Err(problem) => self.problems.push(problem),
        }
        self
    }

    fn value(mut self, name: String, path: &str, value: &str) -> Self {
        let whole = format!("value = {value}");
        let plain = || HoconValue::Scalar(hocon::ScalarValue::string(value.to_owned()));
        let parsed = guard::check(value).ok().and_then(|_| parse(&name, &whole, None).ok());
        let resolved = parsed.and_then(|tree| tree.resolve(ResolveOptions::defaults()).ok());
        let one = resolved.filter(|tree| tree.keys() == ["value"]);
        let value = one.and_then(|tree| tree.get("value").cloned()).unwrap_or_else(plain);
        self.layers.push(Layer::new(name, under(path, value)));
        self
    }
}

fn parse(name: &str, text: &str, base: Option<&Path>) -> Result<Tree, LoadProblem> {
    let plain = |what: String| LoadProblem { layer: name.to_owned(), position: None, what };
    let flawed = |layer: String, flaw: guard::Flaw| LoadProblem {
        layer,
        position: Some((flaw.line, flaw.column)),
        what: flaw.what,
    };
    if text.len() as u64 > BYTES_MAX {
        return Err(plain(format!("is larger than {BYTES_MAX} bytes")));
    }
    let included = guard::check(text).map_err(|flaw| flawed(name.to_owned(), flaw))?;
    let folder = base.map_or_else(|| PathBuf::from("."), Path::to_owned);
    guard::check_included(&included, &folder, 0)
        .map_err(|(path, flaw)| flawed(path.display().to_string(), flaw))?;
    let options = ParseOptions::defaults()
        .with_resolve_substitutions(false)
        .with_origin_description(name.to_owned())
        .with_base_dir(folder);
    hocon::parse_string_with_options(text, options).map_err(|error| problem(name, &error))
}

fn problem(layer: &str, error: &HoconError) -> LoadProblem {
    let (position, what) = match error {
        HoconError::Parse(error) => (Some((error.line, error.col)), error.message.clone()),
        HoconError::Resolve(error) => {
            let what = format!("{} (substitution {:?})", error.message, error.path);
            (Some((error.line, error.col)).filter(|(line, _)| *line > 0), what)
        }
        other => (None, other.to_string()),
    };
    LoadProblem { layer: layer.to_owned(), position, what }
}

/// The part of a tree at a path, as a tree that has it at another; `""` is the whole.
fn mount(tree: &Tree, from: &str, to: &str) -> Result<Tree, String> {
    let part = match from {
        "" => {
            let field = |key: &str| Some((key.to_owned(), at(tree, &[key.to_owned()])?.clone()));
            HoconValue::Object(tree.keys().into_iter().filter_map(field).collect())
        }
        from => at(tree, &parts(from)).cloned().ok_or_else(|| format!("there is nothing at {from}"))?,
    };
    match (to, part) {
        ("", HoconValue::Object(fields)) => Ok(Tree::new(fields)),
        ("", _) => Err(format!("what is at {from} is no section, and cannot be the whole document")),
        (to, part) => Ok(under(to, part)),
    }
}

/// A tree with this value at this path and nothing else.
fn under(path: &str, value: HoconValue) -> Tree {
    let mut parts = parts(path);
    let first = parts.remove(0);
    let wrap = |inner: HoconValue, part: String| HoconValue::Object(IndexMap::from([(part, inner)]));
    Tree::new(IndexMap::from([(first, parts.into_iter().rev().fold(value, wrap))]))
}

/// `LANEWAY_POOL_MAX__WAIT` is `laneway.pool.max-wait`.
pub(crate) fn path_of(variable: &str) -> String {
    let lower = variable.to_lowercase();
    let hidden = lower.replace("___", "\u{1}").replace("__", "-").replace('_', ".");
    hidden.replace('\u{1}', "_")
}

/// The variable that sets this, if there is one: names of variables have one case and few characters.
pub(crate) fn variable_of(path: &[String]) -> Option<String> {
    let part = |part: &String| part.replace('_', "___").replace('-', "__");
    let name = path.iter().map(part).collect::<Vec<_>>().join("_").to_uppercase();
    (parts(&path_of(&name)) == path).then_some(name)
}
