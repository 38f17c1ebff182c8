//! What is wrong, in words for the person who can mend it. One error type for loading, one for reading; each lists everything.

use std::fmt;

/// Texts that could not become a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadError {
    /// Each of them.
    pub problems: Vec<LoadProblem>,
}

/// One text that is not a configuration, or cannot be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadProblem {
    /// The layer: a file's path, or the name that it was given.
    pub layer: String,
    /// Line and column, from 1, where they are known.
    pub position: Option<(usize, usize)>,
    /// What is wrong.
    pub what: String,
}

/// Values that are not what they should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadError {
    /// Each of them.
    pub problems: Vec<ReadProblem>,
}

/// One value that is not what it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadProblem {
    /// The whole path of the key.
    pub path: String,
    /// The value as it may be shown; absent where there is none.
    pub value: Option<String>,
    /// The layer that it came from.
    pub origin: Option<String>,
    /// What is wrong, and what would be right.
    pub what: String,
    /// The layers of the environment by which alone it is wrong, because their variables name no setting.
    pub(crate) strays: Vec<String>,
    /// The known key that was probably meant, as a path.
    pub(crate) near: Option<Vec<String>>,
}

impl ReadProblem {
    pub(crate) fn new(path: String, value: Option<String>, origin: Option<String>, what: String) -> Self {
        ReadProblem { path, value, origin, what, strays: Vec::new(), near: None }
    }
}

impl fmt::Display for LoadProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.position {
            Some((line, column)) => write!(f, "{}:{line}:{column}: {}", self.layer, self.what),
            None => write!(f, "{}: {}", self.layer, self.what),
        }
    }
}

impl fmt::Display for ReadProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.path)?;
        if let Some(value) = &self.value {
            write!(f, " = {value}")?;
        }
        if let Some(origin) = &self.origin {
            write!(f, " ({origin})")?;
        }
        write!(f, ": {}", self.what)
    }
}

fn list(f: &mut fmt::Formatter<'_>, title: &str, problems: &[impl fmt::Display]) -> fmt::Result {
    f.write_str(title)?;
    problems.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        list(f, "the configuration cannot be loaded", &self.problems)
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        list(f, "the configuration is not valid", &self.problems)
    }
}

impl std::error::Error for LoadError {}
impl std::error::Error for ReadError {}
