//! Links in documents: one that leads to a file of the repository must find it there.
//!
//! Links to other sites are not followed, since a test must not fail because somebody else's machine is down; nor are the
//! headings behind a `#`.

use pulldown_cmark::{Event, Parser, Tag};

use super::Finding;

/// Every relative link and picture of a Markdown text leads to something that `exists`.
pub(super) fn links_resolve(text: &str, exists: impl Fn(&str) -> bool) -> Vec<Finding> {
    let dangling = |target: &str| file_of(target).is_some_and(|file| !exists(file));
    Parser::new(text)
        .into_offset_iter()
        .filter_map(|(event, range)| Some((target_of(event)?, range.start)))
        .filter(|(target, _)| dangling(target))
        .map(|(target, offset)| {
            Finding::new(line_of(text, offset), format!("the link `{target}` leads nowhere"))
        })
        .collect()
}

fn target_of(event: Event<'_>) -> Option<String> {
    match event {
        Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
            Some(dest_url.into_string())
        }
        _ => None,
    }
}

/// The file that a link means, without heading or query; nothing for other sites and for headings of the same document.
fn file_of(target: &str) -> Option<&str> {
    let has_scheme = target.split_once(':').is_some_and(|(scheme, _)| !scheme.contains(['/', '#', '.']));
    let file = target.split(['#', '?']).next().unwrap_or_default();
    (!has_scheme && !file.is_empty()).then_some(file)
}

fn line_of(text: &str, offset: usize) -> usize {
    1 + text[..offset].matches('\n').count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dangling_lines(text: &str) -> Vec<usize> {
        let exists = |target: &str| target == "there.md";
        links_resolve(text, exists).into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn a_link_that_leads_nowhere_is_found_on_its_line() {
        assert_eq!(dangling_lines("fine\n\n[text](gone.md)"), [3]);
        assert_eq!(dangling_lines("![picture](gone.svg)"), [1]);
        assert_eq!(dangling_lines("[text][name]\n\n[name]: gone.md"), [1]);
        assert_eq!(dangling_lines("[text](gone.md#heading)"), [1]);
    }

    #[test]
    fn links_to_files_headings_and_other_sites_pass() {
        for text in [
            "[a](there.md)",
            "[a](there.md#part)",
            "[a](#part)",
            "[a](https://example.org/x.md)",
            "<mailto:a@b.org>",
        ] {
            assert!(dangling_lines(text).is_empty(), "{text}");
        }
    }

    #[test]
    fn code_is_not_a_link() {
        assert!(dangling_lines("`a[i](gone.md)`\n\n```\n[text](gone.md)\n```\n").is_empty());
    }
}
