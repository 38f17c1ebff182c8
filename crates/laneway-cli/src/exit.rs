//! How the binary ends: every failure of a verb, and the exit code that a script sees.
//!
//! Both enums are matched exhaustively, and the help text is made from the same table, so that a new way to fail cannot be
//! added without its code and its line of help.

use std::io;
use std::process::ExitCode;

use thiserror::Error;

/// The exit codes, which are part of the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Done,
    Failed,
    Usage,
    Violated,
    Refused,
    Unreachable,
    BadConfiguration,
    Interrupted,
}

impl Exit {
    const ALL: [Exit; 8] = [
        Exit::Done,
        Exit::Failed,
        Exit::Usage,
        Exit::Violated,
        Exit::Refused,
        Exit::Unreachable,
        Exit::BadConfiguration,
        Exit::Interrupted,
    ];

    pub(crate) fn code(self) -> u8 {
        match self {
            Exit::Done => 0,
            Exit::Failed => 1,
            Exit::Usage => 2,
            Exit::Violated => 3,
            Exit::Refused => 4,
            Exit::Unreachable => 5,
            Exit::BadConfiguration => 6,
            // What a shell reports for a process that ctrl-c ended: 128 and the number of the signal.
            Exit::Interrupted => 130,
        }
    }

    fn meaning(self) -> &'static str {
        match self {
            Exit::Done => "done",
            Exit::Failed => "failed: the machine or the environment did not allow it",
            Exit::Usage => "the command line was not understood",
            Exit::Violated => "the contract was violated: order, exclusion or the account",
            Exit::Refused => "the service refused it: no such thing, not valid, or not allowed",
            Exit::Unreachable => "no service answers at the URL",
            Exit::BadConfiguration => "the configuration is not valid",
            Exit::Interrupted => {
                "interrupted by ctrl-c; `serve` only by the second, after the first it drains and is done"
            }
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        exit.code().into()
    }
}

/// What can go wrong in a verb.
#[derive(Debug, Error)]
pub(crate) enum Failure {
    /// A line of the contract did not hold, which is a bug in the product.
    #[error("the contract was violated: {0}")]
    Violated(String),
    /// What was typed is understood by itself, and makes no sense together.
    #[error("{0}\n\nFor more information, try '--help'.")]
    Usage(String),
    /// The service answered that it will not do it, and why.
    #[error("{0}")]
    Refused(String),
    /// Nobody answers.
    #[error("{0}")]
    Unreachable(String),
    /// All that is wrong with it.
    #[error("{0}")]
    BadConfiguration(String),
    /// The user pressed ctrl-c, and what was to be said has been said.
    #[error("interrupted")]
    Interrupted,
    /// What was to be shown could not be written.
    #[error("cannot write the output: {0}")]
    Output(#[from] io::Error),
    /// Anything else, with its causes.
    #[error("{0:#}")]
    Other(#[from] anyhow::Error),
}

impl Failure {
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Failure::Violated(_) => Exit::Violated,
            Failure::Usage(_) => Exit::Usage,
            Failure::Refused(_) => Exit::Refused,
            Failure::Unreachable(_) => Exit::Unreachable,
            Failure::BadConfiguration(_) => Exit::BadConfiguration,
            Failure::Interrupted => Exit::Interrupted,
            // Whoever closed the pipe, as `head` does, has seen enough.
            Failure::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => Exit::Done,
            Failure::Output(_) | Failure::Other(_) => Exit::Failed,
        }
    }

    /// What to tell the user, if there is anything to tell.
    pub(crate) fn words(&self) -> Option<String> {
        (self.exit() != Exit::Done).then(|| self.to_string())
    }
}

/// The table of exit codes, for the help text.
pub(crate) fn help() -> String {
    let rows = Exit::ALL.map(|exit| format!("  {:>3}  {}", exit.code(), exit.meaning()));
    format!("Exit codes:\n{}", rows.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_different_and_in_the_help() {
        let mut codes: Vec<_> = Exit::ALL.iter().map(|exit| exit.code()).collect();
        codes.dedup();
        assert_eq!(codes, [0, 1, 2, 3, 4, 5, 6, 130]);
        assert!(codes.iter().all(|code| help().contains(&format!(" {code}  "))));
    }

    #[test]
    fn failures_map_to_their_codes() {
        assert_eq!(Failure::Violated("order".into()).exit(), Exit::Violated);
        assert_eq!(Failure::Usage("both".into()).exit(), Exit::Usage);
        assert_eq!(Failure::Refused("no such pool".into()).exit(), Exit::Refused);
        assert_eq!(Failure::Unreachable("nobody".into()).exit(), Exit::Unreachable);
        assert_eq!(Failure::BadConfiguration("a typo".into()).exit(), Exit::BadConfiguration);
        assert_eq!(Failure::Interrupted.exit(), Exit::Interrupted);
        assert_eq!(Failure::Other(anyhow::anyhow!("disk")).exit(), Exit::Failed);
        assert_eq!(Failure::Output(io::ErrorKind::StorageFull.into()).exit(), Exit::Failed);
    }

    #[test]
    fn a_reader_who_left_is_no_failure_and_hears_nothing() {
        let failure = Failure::Output(io::ErrorKind::BrokenPipe.into());
        assert_eq!((failure.exit(), failure.words()), (Exit::Done, None));
    }
}
