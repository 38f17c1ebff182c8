//! Typed reading. A program asks a [`Section`] for each key that it knows; what is missing, of the wrong type or out of its range is noted, and so is,
//! at the end, every key that nobody asked for.
//!
//! A question that cannot be answered gives back a stand-in, so that the reading goes on and finds the other mistakes, too. No
//! stand-in gets out: [`Config::read`](crate::Config::read) fails if there was one.

use std::{ops::RangeInclusive, time::Duration};

use hocon::{Config as Tree, HoconValue};
use indexmap::IndexMap;

use crate::{
    Config,
    config::{joined, parts, render, written},
    mask,
    problem::ReadProblem,
};

/// An unknown key is at most this many edits from the known one that is proposed.
pub(crate) const NEAR: usize = 4;

/// A section of a configuration that is being read.
pub struct Section<'a> {
    config: &'a Config,
    /// As messages call it.
    path: String,
    /// The nearest path that layers know; items of a list, and what is in them, have that of the list.
    known_path: Vec<String>,
    in_list: bool,
    fields: Option<&'a IndexMap<String, HoconValue>>,
    /// The whole document has no value of its own.
    is_document: bool,
    /// What stands here is no section, which has been noted: what it lacks is not worth another complaint.
    misshapen: bool,
    asked: Vec<String>,
    problems: Vec<ReadProblem>,
}

impl std::fmt::Debug for Section<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Section({})", self.path)
    }
}

impl<'a> Section<'a> {
    pub(crate) fn at_root(config: &'a Config, root: &str) -> Self {
        let known_path = if root.is_empty() { Vec::new() } else { parts(root) };
        let node = config.value(&known_path);
        Section::over(config, joined(&known_path), known_path, node, root.is_empty())
    }

    fn over(
        config: &'a Config,
        path: String,
        known_path: Vec<String>,
        node: Option<&'a HoconValue>,
        is_document: bool,
    ) -> Self {
        let (fields, problems) = (node.and_then(HoconValue::as_object), Vec::new());
        let mut section = Section {
            config,
            path,
            known_path,
            in_list: false,
            fields,
            is_document,
            misshapen: false,
            asked: Vec::new(),
            problems,
        };
        if let Some(node) = node.filter(|node| !node.is_object() && !node.is_null()) {
            let (path, known_path) = (section.path.clone(), section.known_path.clone());
            section.note_at(path, &known_path, Some(node), "must be a section in braces".to_owned());
            section.misshapen = true;
        }
        section
    }

    /// Its path, as messages call it.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The keys that it has, whether asked for or not.
    pub fn keys(&self) -> Vec<String> {
        if self.is_document {
            return self.config.top_keys().into_iter().map(str::to_owned).collect();
        }
        self.fields.map_or_else(Vec::new, |fields| fields.keys().cloned().collect())
    }

    /// Whether there is a value at this key. Counts as having asked for it.
    pub fn has(&mut self, key: &str) -> bool {
        self.ask(key).is_some()
    }

    /// What `read` makes of this key, if there is a value.
    pub fn optional<T>(&mut self, key: &str, read: impl FnOnce(&mut Self) -> T) -> Option<T> {
        self.has(key).then(|| read(self))
    }

    /// What `read` makes of this key if it is there, and none if it is null, which tells it from a key that is not there.
    pub fn nullable<T>(&mut self, key: &str, read: impl FnOnce(&mut Self) -> T) -> Option<Option<T>> {
        if self.has(key) {
            return Some(Some(read(self)));
        }
        let is_null = self.fields.and_then(|fields| fields.get(key)).is_some_and(HoconValue::is_null);
        is_null.then_some(None)
    }

    /// A whole number in this range.
    pub fn integer(&mut self, key: &str, range: RangeInclusive<u64>) -> u64 {
        let right = format!("a whole number from {} to {}", range.start(), range.end());
        let read = |value: &HoconValue| {
            let number = value.as_i64().and_then(|number| u64::try_from(number).ok());
            number.filter(|number| range.contains(number))
        };
        self.scalar(key, &right, read).unwrap_or(*range.start())
    }

    /// A number; `right` says which ones are, as `fine` decides: `number("multiplier", "above 1.0", |n| n > 1.0)`.
    pub fn number(&mut self, key: &str, right: &str, fine: impl Fn(f64) -> bool) -> f64 {
        let read = |value: &HoconValue| value.as_f64().filter(|number| number.is_finite() && fine(*number));
        self.scalar(key, &format!("a number {right}"), read).unwrap_or_default()
    }

    /// A text; a number or a boolean is one, too.
    pub fn text(&mut self, key: &str) -> String {
        self.scalar(key, "a text", text_of).unwrap_or_default()
    }

    /// `true` or `false`.
    pub fn flag(&mut self, key: &str) -> bool {
        self.scalar(key, "true or false", HoconValue::as_bool).unwrap_or_default()
    }

    /// One of these words. The first is the stand-in, so there must be one.
    pub fn one_of<T: Clone>(&mut self, key: &str, choices: &[(&str, T)]) -> T {
        let words: Vec<_> = choices.iter().map(|(word, _)| *word).collect();
        let right = format!("one of {}", words.join(", "));
        let read = |value: &HoconValue| {
            let text = text_of(value)?;
            choices.iter().find(|(word, _)| *word == text).map(|(_, choice)| choice.clone())
        };
        self.scalar(key, &right, read).unwrap_or_else(|| choices[0].1.clone())
    }

    /// A time with its unit, such as `250 ms`, in this range. A bare number is in milliseconds.
    pub fn duration(&mut self, key: &str, range: RangeInclusive<Duration>) -> Duration {
        let right = format!("a time from {:?} to {:?}, such as \"250 ms\"", range.start(), range.end());
        let read = |value: &HoconValue| {
            let time = alone(value).get_duration("value").ok()?;
            range.contains(&time).then_some(time)
        };
        self.scalar(key, &right, read).unwrap_or(*range.start())
    }

    /// A size with its unit, such as `64 KiB`, in this range. A bare number is in bytes.
    pub fn bytes(&mut self, key: &str, range: RangeInclusive<u64>) -> u64 {
        let right = format!("a size from {} to {} bytes, such as \"64 KiB\"", range.start(), range.end());
        let read = |value: &HoconValue| {
            let bytes = u64::try_from(alone(value).get_bytes("value").ok()?).ok()?;
            range.contains(&bytes).then_some(bytes)
        };
        self.scalar(key, &right, read).unwrap_or(*range.start())
    }

    /// A list of texts.
    pub fn texts(&mut self, key: &str) -> Vec<String> {
        let read = |value: &HoconValue| value.as_array()?.iter().map(text_of).collect();
        self.scalar(key, "a list of texts", read).unwrap_or_default()
    }

    /// A list of lists of texts. `None` if it is not one, which has then been noted.
    pub fn rows(&mut self, key: &str) -> Option<Vec<Vec<String>>> {
        let row = |value: &HoconValue| value.as_array()?.iter().map(text_of).collect::<Option<Vec<_>>>();
        let read = |value: &HoconValue| value.as_array()?.iter().map(row).collect();
        self.scalar(key, "a list of lists of texts, such as [[\"a\", \"b\"], [\"a\"]]", read)
    }

    /// A section within this one. One that is missing is read as if it were empty.
    pub fn section<T>(&mut self, key: &str, read: impl FnOnce(&mut Section<'_>) -> T) -> T {
        let node = self.ask(key);
        self.within(self.path_of(key), self.known_path_of(key), node, self.in_list, read)
    }

    /// The sections of a section whose keys are the user's to choose, by key.
    pub fn sections<T>(
        &mut self,
        key: &str,
        mut read: impl FnMut(&str, &mut Section<'_>) -> T,
    ) -> Vec<(String, T)> {
        self.section(key, |named| {
            let keys = named.keys();
            let read_one = |key: String| {
                let value = named.section(&key, |section| read(&key, section));
                (key, value)
            };
            keys.into_iter().map(read_one).collect()
        })
    }

    /// A list of sections.
    pub fn list<T>(&mut self, key: &str, mut read: impl FnMut(&mut Section<'_>) -> T) -> Vec<T> {
        let Some(node) = self.ask(key) else { return Vec::new() };
        let Some(items) = node.as_array() else {
            self.problem(key, "must be a list of sections");
            return Vec::new();
        };
        let read_one = |(place, item): (usize, &'a HoconValue)| {
            let path = format!("{}[{place}]", self.path_of(key));
            self.within(path, self.known_path_of(key), Some(item), true, &mut read)
        };
        items.iter().enumerate().map(read_one).collect()
    }

    /// How much has been noted here so far: lets a program keep quiet about what follows from a mistake that was told already.
    pub fn problem_count(&self) -> usize {
        self.problems.len()
    }

    /// Notes that a value is wrong for a reason of the program's own. `what` says what would be right.
    pub fn problem(&mut self, key: &str, what: impl Into<String>) {
        let node = self.ask(key);
        self.note_at(self.path_of(key), &self.known_path_of(key), node, what.into());
    }

    /// The same for a part of a value, such as a row of a list: `part` is put after the key, `value` is what is shown.
    pub fn problem_in(&mut self, key: &str, part: &str, value: impl Into<String>, what: impl Into<String>) {
        let path = format!("{}{part}", self.path_of(key));
        // The key may be a secret's, and so may be what the part names.
        let value = mask::shown(&path, &mask::shown(&self.path_of(key), &value.into()));
        let origin = self.config.origin_of(&self.known_path_of(key)).map(str::to_owned);
        self.problems.push(ReadProblem::new(path, Some(value), origin, what.into()));
    }

    fn within<T>(
        &mut self,
        path: String,
        known_path: Vec<String>,
        node: Option<&'a HoconValue>,
        in_list: bool,
        read: impl FnOnce(&mut Section<'_>) -> T,
    ) -> T {
        let mut section = Section::over(self.config, path, known_path, node, false);
        section.in_list = in_list;
        let value = read(&mut section);
        self.problems.extend(section.finish());
        value
    }

    fn ask(&mut self, key: &str) -> Option<&'a HoconValue> {
        if !self.asked.iter().any(|asked| asked == key) {
            self.asked.push(key.to_owned());
        }
        let node = match self.is_document {
            true => self.config.value(&[key.to_owned()]),
            false => self.fields?.get(key),
        };
        node.filter(|value| !value.is_null())
    }

    fn scalar<T>(&mut self, key: &str, right: &str, read: impl Fn(&HoconValue) -> Option<T>) -> Option<T> {
        match self.ask(key) {
            None if self.misshapen => None,
            None => {
                let (path, known_path) = (self.path_of(key), self.known_path_of(key));
                self.note_at(path, &known_path, None, format!("missing, must be {right}"));
                None
            }
            Some(value) => {
                let answer = read(value);
                if answer.is_none() {
                    self.problem(key, format!("must be {right}"));
                    if value.is_object() && !self.in_list {
                        let path = self.known_path_of(key);
                        self.note_strays(self.config.variables_below(&path), Some(path));
                    }
                }
                answer
            }
        }
    }

    fn note_at(&mut self, path: String, known_path: &[String], node: Option<&HoconValue>, what: String) {
        let value = node.map(|node| mask::shown(&path, &render(node)));
        let origin = node.and_then(|_| self.config.origin_of(known_path)).map(str::to_owned);
        self.problems.push(ReadProblem::new(path, value, origin, what));
    }

    fn path_of(&self, key: &str) -> String {
        let dot = if self.path.is_empty() { "" } else { "." };
        format!("{}{dot}{}", self.path, written(key))
    }

    fn known_path_of(&self, key: &str) -> Vec<String> {
        let key = (!self.in_list).then(|| key.to_owned());
        self.known_path.iter().cloned().chain(key).collect()
    }

    /// What was wrong, and every key that was not asked for.
    pub(crate) fn finish(mut self) -> Vec<ReadProblem> {
        let unknown: Vec<_> = self.keys().into_iter().filter(|key| !self.asked.contains(key)).collect();
        for key in unknown {
            let near = self.nearest(&key);
            let what = match &near {
                Some(near) => format!("unknown key, did you mean {near:?}?"),
                None if self.asked.is_empty() => "unknown key, there should be none here".to_owned(),
                None => format!("unknown key, there are {}", self.asked.join(", ")),
            };
            let (path, known_path) = (self.path_of(&key), self.known_path_of(&key));
            let node = match self.is_document {
                true => self.config.value(&known_path),
                false => self.fields.and_then(|fields| fields.get(&key)),
            };
            self.note_at(path, &known_path, node, what);
            if !self.in_list {
                let near = near.map(|near| self.known_path_of(&near));
                self.note_strays(self.config.variables_alone_at(&known_path), near);
            }
        }
        self.problems
    }

    /// Of the problem that was noted last.
    fn note_strays(&mut self, strays: Vec<String>, near: Option<Vec<String>>) {
        if let Some(problem) = self.problems.last_mut() {
            (problem.strays, problem.near) = (strays, near);
        }
    }

    /// The known key that was probably meant. Those that are there already were not.
    fn nearest(&self, key: &str) -> Option<String> {
        let plain = |key: &str| key.to_lowercase().replace(['_', '-'], "");
        let distance = |known: &String| strsim::damerau_levenshtein(&plain(known), &plain(key));
        let near = self.asked.iter().map(|known| (distance(known), known)).min()?;
        (near.0 <= NEAR.min(key.len() / 2)).then(|| near.1.clone())
    }
}

fn text_of(value: &HoconValue) -> Option<String> {
    match value {
        HoconValue::Scalar(scalar) if !value.is_null() => Some(scalar.raw.clone()),
        _ => None,
    }
}

/// A document with this value alone, so that the parser's own rules for units apply.
fn alone(value: &HoconValue) -> Tree {
    Tree::new(IndexMap::from([("value".to_owned(), value.clone())]))
}
