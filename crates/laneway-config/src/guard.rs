//! What a text must be before the parser sees it: not too long, not too deep, and with every brace closed by its own.
//!
//! The parser stops at a brace that closes nothing, and at the end of an outer object, and forgets whatever follows. A
//! configuration of which half is ignored is worse than none, so the braces are counted here. `layers` hands texts in; what is found
//! goes into its list of problems.

use std::path::{Path, PathBuf};

/// No configuration that a person has written comes near it.
pub(crate) const BYTES_MAX: u64 = 1 << 20;

/// Deeper nesting is a mistake, or an attempt on the parser's stack.
const DEPTH_MAX: usize = 64;

/// Files included by files included by files.
const INCLUDES_MAX: usize = 16;

/// Where it is wrong, from line 1 and column 1, and how.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Flaw {
    pub(crate) line: usize,
    pub(crate) column: usize,
    pub(crate) what: String,
}

/// Reads a file, up to the limit.
pub(crate) fn read(path: &Path) -> Result<String, String> {
    use std::io::Read;
    let file = std::fs::File::open(path).map_err(|error| error.to_string())?;
    let mut bytes = Vec::new();
    file.take(BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > BYTES_MAX {
        return Err(format!("is larger than {BYTES_MAX} bytes"));
    }
    String::from_utf8(bytes).map_err(|_| "is not UTF-8".to_owned())
}

/// Checks a text and the names of what it includes.
pub(crate) fn check(text: &str) -> Result<Vec<String>, Flaw> {
    let mut scan = Scan { rest: text.char_indices().peekable(), text, line: 1, line_start: 0 };
    scan.run()
}

/// Checks every file that `text` includes, directly or not. `base` is the folder of the text. Gives back the first flaw and its file.
pub(crate) fn check_included(included: &[String], base: &Path, depth: usize) -> Result<(), (PathBuf, Flaw)> {
    for name in included {
        for path in candidates(base, name) {
            if !path.is_file() {
                continue;
            }
            let at = |what: String| (path.clone(), Flaw { line: 1, column: 1, what });
            if depth >= INCLUDES_MAX {
                return Err(at(format!("is included more than {INCLUDES_MAX} files deep")));
            }
            let text = read(&path).map_err(at)?;
            // Properties have no braces.
            if path.extension().is_some_and(|extension| extension == "properties") {
                continue;
            }
            let further = check(&text).map_err(|flaw| (path.clone(), flaw))?;
            check_included(&further, path.parent().unwrap_or(base), depth + 1)?;
        }
    }
    Ok(())
}

/// The files that an include may mean.
fn candidates(base: &Path, name: &str) -> Vec<PathBuf> {
    let suffixes = ["", ".conf", ".json", ".properties"];
    let bases = [base.to_owned(), PathBuf::from(".")];
    let named = |base: &PathBuf| suffixes.map(|suffix| base.join(format!("{name}{suffix}")));
    bases.iter().flat_map(named).collect()
}

/// A walk over the characters that knows strings and comments.
struct Scan<'a> {
    rest: std::iter::Peekable<std::str::CharIndices<'a>>,
    text: &'a str,
    line: usize,
    line_start: usize,
}

impl Scan<'_> {
    fn run(&mut self) -> Result<Vec<String>, Flaw> {
        let mut open: Vec<(char, usize, usize)> = Vec::new();
        let mut included = Vec::new();
        // Whether the document is one object in braces, and whether that has been closed.
        let (mut braced, mut closed) = (None, false);
        while let Some((at, char)) = self.next() {
            if char.is_whitespace() || char == ',' || char == '\u{feff}' {
                continue;
            }
            if char == '#' || (char == '/' && self.peek() == Some('/')) {
                self.skip_line();
                continue;
            }
            let first = *braced.get_or_insert(char == '{');
            if closed {
                let what = "text after the end of the outer braces: it would be ignored".to_owned();
                return Err(self.flaw(at, what));
            }
            match char {
                '"' => self.skip_string(at)?,
                '{' | '[' => {
                    open.push((char, self.line, at + 1 - self.line_start));
                    if open.len() > DEPTH_MAX {
                        return Err(self.flaw(at, format!("nested more than {DEPTH_MAX} deep")));
                    }
                }
                '}' | ']' => {
                    let wanted = if char == '}' { '{' } else { '[' };
                    match open.pop() {
                        Some((opened, ..)) if opened == wanted => {}
                        Some((opened, line, column)) => {
                            let what =
                                format!("{char:?} closes the {opened:?} of line {line}, column {column}");
                            return Err(self.flaw(at, what));
                        }
                        None => {
                            let what = format!("{char:?} closes nothing: what follows it would be ignored");
                            return Err(self.flaw(at, what));
                        }
                    }
                    closed = first && open.is_empty();
                }
                '$' if self.peek() == Some('{') => self.skip_substitution(at)?,
                _ => included.extend(self.skip_word(at)),
            }
        }
        match open.pop() {
            None => Ok(included),
            Some((opened, line, column)) => {
                Err(Flaw { line, column, what: format!("{opened:?} is never closed") })
            }
        }
    }

    fn next(&mut self) -> Option<(usize, char)> {
        let (at, char) = self.rest.next()?;
        if char == '\n' {
            self.line += 1;
            self.line_start = at + 1;
        }
        Some((at, char))
    }

    fn peek(&mut self) -> Option<char> {
        self.rest.peek().map(|(_, char)| *char)
    }

    fn flaw(&self, at: usize, what: String) -> Flaw {
        Flaw { line: self.line, column: at.saturating_sub(self.line_start) + 1, what }
    }

    fn skip_line(&mut self) {
        while self.peek().is_some_and(|char| char != '\n') {
            self.next();
        }
    }

    fn skip_string(&mut self, at: usize) -> Result<(), Flaw> {
        let start = self.flaw(at, "a text in quotes is never closed".to_owned());
        if self.text[at..].starts_with("\"\"\"") {
            let mut quotes = 0;
            self.next();
            self.next();
            while let Some((_, char)) = self.next() {
                quotes = if char == '"' { quotes + 1 } else { 0 };
                if quotes >= 3 && self.peek() != Some('"') {
                    return Ok(());
                }
            }
            return Err(start);
        }
        while let Some((_, char)) = self.next() {
            match char {
                '\\' => {
                    self.next();
                }
                '"' => return Ok(()),
                '\n' => return Err(start),
                _ => {}
            }
        }
        Err(start)
    }

    fn skip_substitution(&mut self, at: usize) -> Result<(), Flaw> {
        let start = self.flaw(at, "a substitution is never closed".to_owned());
        while let Some((at, char)) = self.next() {
            match char {
                '"' => self.skip_string(at)?,
                '}' => return Ok(()),
                '\n' => return Err(start),
                _ => {}
            }
        }
        Err(start)
    }

    /// Skips an unquoted word; if it is an include, gives back what it names. A value that only looks like one costs a look at a file.
    fn skip_word(&mut self, at: usize) -> Option<String> {
        while self.peek().is_some_and(|char| char.is_alphanumeric() || char == '-' || char == '_') {
            self.next();
        }
        let rest = self.text[at..].strip_prefix("include")?;
        let rest = rest.strip_prefix([' ', '\t'])?.trim_start();
        let line = rest.lines().next()?;
        let (before, quoted) = line.split_once('"')?;
        let is_include =
            ["", "file(", "required(", "required(file("].contains(&before.replace(' ', "").as_str());
        is_include.then(|| quoted.split('"').next().unwrap_or_default().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flaw(text: &str) -> Flaw {
        check(text).expect_err(text)
    }

    #[test]
    fn what_is_well_formed_passes() {
        for text in [
            "",
            "a = 1",
            "{ a = 1 } # and a comment }",
            "a { b = [[\"}\"], [x]] } // }",
            "a = \"\"\" } \" \"\" } \"\"\"\nb = ${?c}${d}",
            "a = \"\\\"}\"",
            "a = \"\"\"ends in a quote\"\"\"\"\nb {}",
        ] {
            assert_eq!(check(text), Ok(vec![]), "{text}");
        }
    }

    #[test]
    fn a_brace_that_closes_nothing_is_found_where_it_stands() {
        let found = flaw("a = 1\n  }\nb = 2");
        assert_eq!((found.line, found.column), (2, 3));
        assert!(found.what.contains("closes nothing"), "{}", found.what);
    }

    #[test]
    fn other_flaws_are_found() {
        assert!(flaw("{ a = 1 }\nb = 2").what.contains("after the end"));
        assert!(flaw("a = [1, 2}").what.contains("closes the '['"));
        assert!(flaw("a {\n b = 1").what.contains("never closed"));
        assert!(flaw("a = \"x\nb = 1").what.contains("quotes"));
        assert!(flaw("a = ${x\nb = 1").what.contains("substitution"));
        assert!(flaw(&"a {".repeat(65)).what.contains("deep"));
    }

    #[test]
    fn includes_are_named() {
        let text = "include \"a.conf\"\nb { include required(file(\"c\")) }\nincluded = \"d\"";
        assert_eq!(check(text), Ok(vec!["a.conf".to_owned(), "c".to_owned()]));
    }
}
