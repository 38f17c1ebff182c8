//! What is not shown: secrets. `problem` and `config` ask before they print a value.

/// Parts of a key's last word that make its value a secret.
const SECRET_WORDS: [&str; 8] =
    ["password", "passwd", "secret", "token", "credential", "private-key", "api-key", "access-key"];

/// The value as it may be shown to whoever reads logs.
pub(crate) fn shown(path: &str, value: &str) -> String {
    let last = path.rsplit('.').next().unwrap_or(path).to_lowercase().replace('_', "-");
    if SECRET_WORDS.iter().any(|word| last.contains(word)) {
        return "(hidden)".to_owned();
    }
    without_users(value)
}

/// Hides the user part of each URL in a value.
fn without_users(value: &str) -> String {
    let mut shown = String::with_capacity(value.len());
    let mut rest = value;
    while let Some((before, after)) = rest.split_once("://") {
        shown.push_str(before);
        shown.push_str("://");
        let end = after.find(['/', '"', ' ', ',', '?', '#']).unwrap_or(after.len());
        let authority = &after[..end];
        match authority.rsplit_once('@') {
            Some((_, host)) => {
                shown.push_str("(hidden)@");
                shown.push_str(host);
            }
            None => shown.push_str(authority),
        }
        rest = &after[end..];
    }
    shown.push_str(rest);
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_and_users_of_urls_are_hidden() {
        assert_eq!(shown("a.b.password", "x"), "(hidden)");
        assert_eq!(shown("a.API_KEY", "x"), "(hidden)");
        assert_eq!(shown("a.tokens-per-second", "5"), "(hidden)", "rather one too many");
        assert_eq!(shown("url", "amqp://me:p@ss@host:1/x"), "amqp://(hidden)@host:1/x");
        assert_eq!(shown("urls", "[\"a://u@h\",\"b://h/p@q\"]"), "[\"a://(hidden)@h\",\"b://h/p@q\"]");
        assert_eq!(shown("a.b", "plain"), "plain");
    }
}
