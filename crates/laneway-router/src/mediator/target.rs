//! A target as it is called: its URL, checked, and the name under which it is remembered.
//!
//! `http.rs` hands over the text of a message's `mediationTarget`. What is checked here is what the client connects to, in the same parsed
//! form: a second reading of the text, by other rules, is how allow-lists are walked around.

use std::fmt;

use hyper::Uri;
use hyper::http::uri::{Authority, Scheme};

/// What is one target to a breaker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// Scheme, host, port and path; the query does not matter. One endpoint of a service may be ill while its neighbours are well.
    #[default]
    Path,
    /// Scheme, host and port. For targets with a number in the path, which would all be different otherwise.
    Origin,
}

/// Why a text cannot be called.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadTarget {
    /// Not a URL at all.
    #[error("`{text}` is not a URL: {problem}")]
    NotAUrl {
        /// The beginning of it, without secrets, as in all of these.
        text: String,
        /// What the parser said.
        problem: String,
    },
    /// Something other than http and https.
    #[error("`{0}` does not begin with http:// or https://")]
    Scheme(String),
    /// A user name or password in front of the host; they would end up in logs.
    #[error("the URL has a user name in front of its host; use authToken instead")]
    Credentials,
    /// A port that is none.
    #[error("what is behind `{0}:` is not a port between 0 and 65535")]
    Port(String),
    /// Not on the list.
    #[error("`{0}` is not on the list of allowed targets")]
    NotAllowed(String),
    /// Not what `SIMULATED` takes.
    #[error("{0}")]
    Simulated(String),
    /// Not the name of a sink.
    #[error("there is no sink {0:?}; laneway.sinks has those that there are")]
    NoSink(String),
}

/// Reads the URL of a target.
pub(super) fn parse(text: &str) -> Result<Uri, BadTarget> {
    let uri: Uri = text.parse().map_err(|problem: hyper::http::uri::InvalidUri| BadTarget::NotAUrl {
        text: beginning(text),
        problem: problem.to_string(),
    })?;
    if uri.scheme() != Some(&Scheme::HTTP) && uri.scheme() != Some(&Scheme::HTTPS) {
        return Err(BadTarget::Scheme(beginning(text)));
    }
    let authority = uri.authority().map_or("", Authority::as_str);
    if authority.contains('@') {
        return Err(BadTarget::Credentials);
    }
    // The parser leaves a port that is too large, or empty, to whoever asks for it; the client would silently take the default.
    if uri.port().is_none() && uri.host() != Some(authority) {
        // What is behind the colon may be a password, with a slash or the like in it that has ended it too early.
        return Err(BadTarget::Port(beginning(uri.host().unwrap_or_default())));
    }
    Ok(uri)
}

/// Enough of a foreign text to recognise it, in reasons that are logged, kept and shown. It is not what it should be, so nobody can say where a name and a password in it
/// end: if it may have them, nothing is quoted but the scheme.
pub(super) fn beginning(text: &str) -> String {
    let place = text.split(['?', '#']).next().unwrap_or_default();
    let place = match text.split_once('@') {
        None => place.to_owned(),
        Some((before, _)) => match before.split_once("://") {
            Some((scheme, _)) => format!("{scheme}://…"),
            None => "…".to_owned(),
        },
    };
    place.chars().take(100).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

impl Scope {
    /// The name of a target: two spellings of one target have the same.
    pub(super) fn name(self, uri: &Uri) -> String {
        let scheme = uri.scheme_str().unwrap_or_default();
        let host = uri.host().unwrap_or_default();
        let path = if self == Scope::Path { uri.path() } else { "" };
        let mut name = String::with_capacity(scheme.len() + 3 + host.len() + 6 + path.len());
        name.push_str(scheme);
        name.push_str("://");
        name.push_str(host);
        name.make_ascii_lowercase();
        if let Some(port) = uri.port_u16().filter(|port| Some(*port) != default_port(uri)) {
            name.push_str(&format!(":{port}"));
        }
        name.push_str(path);
        name
    }
}

fn default_port(uri: &Uri) -> Option<u16> {
    match uri.scheme_str()? {
        "https" => Some(443),
        _ => Some(80),
    }
}

/// Which targets are meant.
///
/// | pattern | matches |
/// |---|---|
/// | `api.example.com` | that host, with any scheme, port and path |
/// | `*.example.com` | every host below it, not itself |
/// | `api.example.com:8443` | that host and port |
/// | `https://api.example.com/hooks` | that scheme, host and port (443), and this path and all below it |
///
/// ```
/// use laneway_router::mediator::Pattern;
/// let pattern: Pattern = "https://api.example.com/hooks".parse().unwrap();
/// assert!(pattern.matches(&"https://api.example.com/hooks/orders?id=7".parse().unwrap()));
/// assert!(!pattern.matches(&"https://api.example.com/hooks/../admin".parse().unwrap()));
/// assert!(!pattern.matches(&"https://api.example.com.evil.org/hooks".parse().unwrap()));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    scheme: Option<Scheme>,
    /// In lower case.
    host: String,
    /// Whether it stands for all hosts below it.
    below: bool,
    port: Option<u16>,
    /// Without a slash at its end; empty for all paths.
    path: String,
}

/// Why a text is not a pattern.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is none of: a host, *.host, host:port, a URL")]
pub struct BadPattern(String);

impl std::str::FromStr for Pattern {
    type Err = BadPattern;

    fn from_str(text: &str) -> Result<Self, BadPattern> {
        let bad = || BadPattern(text.to_owned());
        let (scheme, rest) = match text.split_once("://") {
            Some(("http", rest)) => (Some(Scheme::HTTP), rest),
            Some(("https", rest)) => (Some(Scheme::HTTPS), rest),
            Some(_) => return Err(bad()),
            None => (None, text),
        };
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let (authority, below) = match authority.strip_prefix("*.") {
            Some(authority) => (authority, true),
            None => (authority, false),
        };
        // A path without a scheme would look as if it protected something.
        let has_stray_path = scheme.is_none() && !path.is_empty();
        let is_unclear =
            authority.contains(['@', '*']) || path.contains(['?', '#', '*']) || path_is_ambiguous(path);
        let authority: Authority = authority.parse().map_err(|_| bad())?;
        let port = authority.port_u16();
        let port_is_bad = port.is_none() && authority.host() != authority.as_str();
        if has_stray_path || is_unclear || port_is_bad || authority.host().is_empty() {
            return Err(bad());
        }
        let port = port.or(scheme.as_ref().map(|scheme| if *scheme == Scheme::HTTPS { 443 } else { 80 }));
        let host = authority.host().to_ascii_lowercase();
        Ok(Pattern { scheme, host, below, port, path: path.trim_end_matches('/').to_owned() })
    }
}

impl Pattern {
    /// Whether this URL is meant.
    pub fn matches(&self, uri: &Uri) -> bool {
        let port = uri.port_u16().or(default_port(uri));
        self.scheme.as_ref().is_none_or(|scheme| uri.scheme() == Some(scheme))
            && uri.host().is_some_and(|host| self.matches_host(host))
            && self.port.is_none_or(|expected| port == Some(expected))
            && self.matches_path(uri.path())
    }

    fn matches_host(&self, host: &str) -> bool {
        if !self.below {
            return host.eq_ignore_ascii_case(&self.host);
        }
        let Some(labels) = host.len().checked_sub(self.host.len()).filter(|labels| *labels > 1) else {
            return false;
        };
        let (below, own) = (&host.as_bytes()[..labels], &host.as_bytes()[labels..]);
        below.ends_with(b".") && own.eq_ignore_ascii_case(self.host.as_bytes())
    }

    fn matches_path(&self, path: &str) -> bool {
        let Some(rest) = path.strip_prefix(self.path.as_str()) else { return false };
        self.path.is_empty() || ((rest.is_empty() || rest.starts_with('/')) && !path_is_ambiguous(path))
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(scheme) = &self.scheme {
            write!(f, "{scheme}://")?;
        }
        let star = if self.below { "*." } else { "" };
        write!(f, "{star}{}", self.host)?;
        if let Some(port) = self.port {
            write!(f, ":{port}")?;
        }
        f.write_str(&self.path)
    }
}

/// Whether a server might read the path otherwise than it looks: `..`, `.`, and slashes in disguise.
fn path_is_ambiguous(path: &str) -> bool {
    let plain = path.to_ascii_lowercase().replace("%2e", ".");
    let has_hidden_slash = plain.contains('\\') || plain.contains("%2f") || plain.contains("%5c");
    // Twice encoded: some servers decode twice.
    let is_encoded_twice = plain.contains("%25");
    has_hidden_slash || is_encoded_twice || plain.split('/').any(|segment| segment == "." || segment == "..")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_a_url_with_a_host_and_nothing_strange() {
        for good in
            ["http://a", "https://a.b:8443/c?d=e", "http://[::1]:80/", "HTTP://A/x", "http://127.0.0.1:0/"]
        {
            assert!(parse(good).is_ok(), "{good}: {:?}", parse(good));
        }
        for (bad, part) in [
            ("", "not a URL"),
            ("orders", "begin with http"),
            ("/orders", "begin with http"),
            ("ftp://a/", "begin with http"),
            ("file:///etc/passwd", ""),
            ("http://", "not a URL"),
            ("http:///path", "not a URL"),
            ("http://user:secret@a/", "authToken"),
            ("http://a:99999/", "port"),
            ("http://a:/", "port"),
            ("http://a:x/", "port"),
            ("http://a b/", "not a URL"),
            ("http://a/\r\nx: y", "not a URL"),
        ] {
            let error = parse(bad).expect_err(bad).to_string();
            assert!(error.contains(part), "{bad}: {error}");
            assert!(!error.contains("secret"));
        }
        assert!(parse(&format!("http://a/{}", "x".repeat(100_000))).unwrap_err().to_string().len() < 250);
    }

    #[test]
    fn what_is_quoted_of_a_bad_target_has_no_secrets() {
        for (bad, shown) in [
            ("htps://me:hush@h/?token=hush", "`htps://…` does not begin with"),
            ("htps://h/a?token=hush#hush", "`htps://h/a` does not begin with"),
            ("http://me:hu sh@h/", "`http://…` is not a URL"),
            ("http://h /a?token=hush", "`http://h /a` is not a URL"),
            ("me:hush@h/a", "`…` is not a URL"),
            ("http:///me:hush@h/", "`http://…` is not a URL"),
            ("http://me:hush/hush@h/", "behind `me:` is not a port"),
            ("http://me:hush?hush@h/", "behind `me:` is not a port"),
        ] {
            let error = parse(bad).expect_err(bad).to_string();
            assert!(error.contains(shown) && !error.contains("hu"), "{bad}: {error}");
        }
    }

    #[test]
    fn one_target_has_one_name() {
        let path = |text: &str| Scope::Path.name(&parse(text).unwrap());
        assert_eq!(path("HTTP://Host:80/A?q=1#f"), "http://host/A");
        assert_eq!(path("https://host:443"), "https://host/");
        assert_eq!(path("https://host:80/"), "https://host:80/");
        assert_ne!(path("http://host/a"), path("http://host/b"));
        let origin = |text: &str| Scope::Origin.name(&parse(text).unwrap());
        assert_eq!(origin("http://host/a"), origin("http://host/b?c"));
        assert_ne!(origin("http://host/a"), origin("http://host:81/a"));
        assert_ne!(origin("http://host/a"), origin("https://host/a"));
    }

    fn matches(pattern: &str, url: &str) -> bool {
        pattern.parse::<Pattern>().unwrap().matches(&parse(url).unwrap())
    }

    #[test]
    fn patterns_mean_what_they_say() {
        for (pattern, url) in [
            ("a.org", "http://a.org/"),
            ("a.org", "https://A.ORG:8443/x"),
            ("*.a.org", "http://b.a.org/"),
            ("*.a.org", "http://c.b.A.org/"),
            ("a.org:8080", "http://a.org:8080/x"),
            ("a.org:80", "http://a.org/x"),
            ("[::1]:80", "http://[::1]/"),
            ("https://a.org", "https://a.org/anything/../at/all"),
            ("https://a.org/", "https://a.org:443/x"),
            ("https://a.org/hooks", "https://a.org/hooks"),
            ("https://a.org/hooks/", "https://a.org/hooks/x?y=.."),
            ("http://*.a.org:81/hooks", "http://b.a.org:81/hooks/x"),
        ] {
            assert!(matches(pattern, url), "{pattern} should match {url}");
        }
        for (pattern, url) in [
            ("a.org", "http://b.a.org/"),
            ("a.org", "http://a.org.evil.net/"),
            ("a.org", "http://evil.net/a.org"),
            ("a.org", "http://a.org./"),
            ("*.a.org", "http://a.org/"),
            ("*.a.org", "http://.a.org/"),
            ("*.a.org", "http://evila.org/"),
            ("a.org:8080", "http://a.org/"),
            ("https://a.org", "http://a.org/"),
            ("https://a.org", "https://a.org:444/"),
            ("https://a.org/hooks", "https://a.org/hooksandmore"),
            ("https://a.org/hooks", "https://a.org/"),
            ("https://a.org/hooks", "https://a.org/hooks/../admin"),
            ("https://a.org/hooks", "https://a.org/hooks/%2E%2e/admin"),
            ("https://a.org/hooks", "https://a.org/hooks/.%2e%2fadmin"),
            ("https://a.org/hooks", "https://a.org/hooks/%252e%252e/admin"),
        ] {
            assert!(!matches(pattern, url), "{pattern} should not match {url}");
        }
    }

    #[test]
    fn what_is_no_pattern_is_refused() {
        for text in [
            "",
            "*",
            "a.org/hooks",
            "ftp://a.org",
            "a*.org",
            "u@a.org",
            "https://a.org/x?y",
            "a:99999",
            "https://a/..",
            "https:///x",
        ] {
            assert!(text.parse::<Pattern>().is_err(), "{text}");
        }
        for text in ["a.org", "*.a.org", "a.org:80", "https://a.org:443/hooks"] {
            assert_eq!(text.parse::<Pattern>().unwrap().to_string(), text);
        }
    }
}
