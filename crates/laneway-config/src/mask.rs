//! What is not shown: secrets. `problem` and `config` ask before they print a value.

/// Parts of a key that make its value a secret.
const SECRET_WORDS: [&str; 12] = [
    "password",
    "passwd",
    "passcode",
    "secret",
    "token",
    "credential",
    "private-key",
    "api-key",
    "access-key",
    "pem",
    "jaas",
    "oauthbearer",
];

/// Parameters of a URL whose values are secrets.
const SECRET_PARAMETERS: [&str; 3] = ["password", "passfile", "sslpassword"];

/// What stands for a secret.
const HIDDEN: &str = "(hidden)";

/// The value as it may be shown to whoever reads logs.
pub(crate) fn shown(path: &str, value: &str) -> String {
    let key = path.to_lowercase().replace('_', "-");
    if SECRET_WORDS.iter().any(|word| key.contains(word)) {
        return HIDDEN.to_owned();
    }
    without_parameters(&without_users(value))
}

/// Hides the user part of each URL in a value. A password that was not encoded may hold anything, so all goes up to the last `@` of what may be one URL:
/// rather too much.
fn without_users(value: &str) -> String {
    let mut shown = String::with_capacity(value.len());
    let mut rest = value;
    while let Some((before, after)) = rest.split_once("://") {
        shown.push_str(before);
        shown.push_str("://");
        let is_end = |c: char| c.is_whitespace() || c == '"' || c == '\'';
        let end = after.find(is_end).unwrap_or(after.len());
        let end = after.find("://").map_or(end, |next| end.min(next));
        match after[..end].rfind('@') {
            Some(at) => {
                shown.push_str(HIDDEN);
                rest = &after[at..];
            }
            None => rest = after,
        }
    }
    shown.push_str(rest);
    shown
}

/// Hides the values of parameters that are secrets.
fn without_parameters(value: &str) -> String {
    let mut shown = String::with_capacity(value.len());
    let mut rest = value;
    while let Some(at) = rest.find(['?', '&']) {
        shown.push_str(&rest[..=at]);
        rest = &rest[at + 1..];
        let Some((name, after)) = rest.split_once('=') else { continue };
        if SECRET_PARAMETERS.iter().any(|secret| name.eq_ignore_ascii_case(secret)) {
            let is_end = |c: char| c.is_whitespace() || matches!(c, '&' | '#' | '"' | '\'');
            let end = after.find(is_end).unwrap_or(after.len());
            shown.push_str(name);
            shown.push('=');
            shown.push_str(HIDDEN);
            rest = &after[end..];
        }
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
        assert_eq!(shown("urls", "[\"a://u@h\",\"b://h/p@q\"]"), "[\"a://(hidden)@h\",\"b://(hidden)@q\"]");
        assert_eq!(shown("url", "amqp://me:p/w?d@host:1/x"), "amqp://(hidden)@host:1/x", "as it was typed");
        assert_eq!(
            shown("url", "nats://u:a,b@one,nats://u:c@two"),
            "nats://(hidden)@one,nats://(hidden)@two"
        );
        assert_eq!(
            shown("url", "pg://h/db?user=me&PassWord=x&a=1"),
            "pg://h/db?user=me&PassWord=(hidden)&a=1"
        );
        assert_eq!(shown("url", "pg://h?sslpassword=x y"), "pg://h?sslpassword=(hidden) y");
        for key in
            ["ssl.key.pem", "sasl.jaas.config", "sasl.oauthbearer.config", "a.passcode", "a.password.b"]
        {
            assert_eq!(shown(key, "x"), "(hidden)", "{key}");
        }
        assert_eq!(shown("a.b", "plain"), "plain");
    }
}
