//! What is said when there is no key, or no source.

use std::{borrow::Cow, error::Error, fmt};

use super::KeySource;
use crate::claim::TextError;

/// Why a request gave no key.
///
/// The two are different answers to the sender: most senders post a few requests that carry no key
/// by right (handshakes, pings), while a key that cannot be one is a fault of the sender or of the
/// configuration. There is no third, so this enum is exhaustive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoKey {
    /// The source is not there, or is empty.
    Missing(Fault),
    /// The source is there but cannot be a key.
    Invalid(Fault),
}

impl NoKey {
    pub(super) fn new(source: &KeySource, problem: Problem) -> Self {
        let missing = problem.is_missing();
        let fault = Fault(vec![(source.to_string(), problem)]);
        if missing { Self::Missing(fault) } else { Self::Invalid(fault) }
    }

    /// The source and its fault.
    pub fn fault(&self) -> &Fault {
        match self {
            Self::Missing(fault) | Self::Invalid(fault) => fault,
        }
    }
}

impl fmt::Display for NoKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(fault) => write!(f, "no event key: {fault}"),
            Self::Invalid(fault) => write!(f, "invalid event key: {fault}"),
        }
    }
}

impl Error for NoKey {}

/// A source and its fault, such as ``"`json:$.id` is a boolean; an event key is a string or an
/// integer"``.
///
/// It names what was configured and never repeats what was sent, so it may go to logs and back to
/// the sender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault(Vec<(String, Problem)>);

impl Fault {
    pub(super) fn none() -> Self {
        Self(Vec::new())
    }

    /// Adds what the next alternative of an `or` said.
    pub(super) fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (source, problem)) in self.0.iter().enumerate() {
            let and = if at > 0 { "; and " } else { "" };
            write!(f, "{and}`{source}` {problem}")?;
        }
        Ok(())
    }
}

/// What is wrong with what one source found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Problem {
    // The key is missing:
    Absent,
    Empty,
    NoneGiven,
    EmptyBody,
    NotJson { line: usize, column: usize },
    NotUtf8Json,
    NothingThere,
    Null,
    // The key is invalid:
    Boolean,
    Fraction,
    Object,
    Array,
    LoneSurrogate,
    TwiceNamed { name: String },
    TwoValues,
    NotUtf8,
    NoIdempotencyKey,
    Refused(String),
    Text(TextError),
}

impl Problem {
    fn is_missing(&self) -> bool {
        match self {
            Self::Absent
            | Self::Empty
            | Self::NoneGiven
            | Self::EmptyBody
            | Self::NotJson { .. }
            | Self::NotUtf8Json
            | Self::NothingThere
            | Self::Null => true,
            Self::Boolean
            | Self::Fraction
            | Self::Object
            | Self::Array
            | Self::LoneSurrogate
            | Self::TwiceNamed { .. }
            | Self::TwoValues
            | Self::NotUtf8
            | Self::NoIdempotencyKey
            | Self::Refused(_)
            | Self::Text(_) => false,
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let wrong_type = match self {
            Self::Absent => return f.write_str("is absent"),
            Self::Empty => return f.write_str("is empty"),
            Self::NoneGiven => return f.write_str("gave no key"),
            Self::EmptyBody => return f.write_str("finds nothing: the body is empty"),
            Self::NotJson { line, column } => {
                return write!(
                    f,
                    "finds nothing: the body is not JSON (line {line}, column {column})"
                );
            }
            Self::NotUtf8Json => {
                return f.write_str("finds nothing: the body is not JSON (it is not UTF-8)");
            }
            Self::NothingThere => return f.write_str("finds nothing in the body"),
            Self::Null => return f.write_str("is null"),
            Self::LoneSurrogate => {
                return f.write_str("is a string with half a surrogate pair, which is no text");
            }
            Self::TwiceNamed { name } => {
                return write!(f, "meets the name `{}` twice in one object", Plain(name));
            }
            Self::TwoValues => return f.write_str("is there more than once, with two values"),
            Self::NotUtf8 => return f.write_str("is not UTF-8"),
            Self::NoIdempotencyKey => {
                return f.write_str(
                    "is malformed; send one quoted string such as \"8e03978e\", or bare, visible \
                     ASCII characters without `\"`, `,`, `;` and `\\`",
                );
            }
            Self::Refused(message) => return write!(f, "gave no key: {message}"),
            Self::Text(error) => return error.fmt(f),
            Self::Boolean => "a boolean",
            Self::Fraction => "a number with a fraction or an exponent",
            Self::Object => "an object",
            Self::Array => "an array",
        };
        write!(f, "is {wrong_type}; an event key is a string or an integer")
    }
}

/// Why something cannot be a [`KeySource`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeySourceError {
    /// The name given to [`KeySource::header`] is none.
    Header {
        /// What was given.
        name: String,
    },
    /// The path given to [`KeySource::json`] is none, or may find more than one value.
    Path {
        /// What was given.
        path: String,
        /// The character that does not fit, counted from 1; one past the last if the end is early.
        at: usize,
        /// What is wrong there, and what to write.
        reason: Cow<'static, str>,
    },
    /// The name given to [`KeySource::query`] is empty.
    EmptyQueryName,
    /// The text form cannot be read.
    Text {
        /// What was given.
        text: String,
        /// The character that does not fit, counted from 1; one past the last if the end is early.
        at: usize,
        /// What is wrong there, and what to write.
        reason: Cow<'static, str>,
    },
}

impl fmt::Display for KeySourceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header { name } => {
                write!(f, "`{}` is no header name; {HEADER_NAME}", Plain(name))
            }
            Self::Path { path, at, reason } => {
                write!(
                    f,
                    "`{}` is no path to one value: at {}: {reason}",
                    Plain(path),
                    At(path, *at)
                )
            }
            Self::EmptyQueryName => {
                f.write_str("the name of the query parameter is empty; give one, such as `event`")
            }
            Self::Text { text, at, reason } => {
                write!(f, "`{}` is no key source: at {}: {reason}", Plain(text), At(text, *at))
            }
        }
    }
}

impl Error for KeySourceError {}

/// What a parser stumbled over, by byte.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Flaw {
    pub(super) at: usize,
    pub(super) reason: Cow<'static, str>,
}

impl Flaw {
    pub(super) fn new(at: usize, reason: impl Into<Cow<'static, str>>) -> Self {
        Self { at, reason: reason.into() }
    }

    pub(super) fn in_path(self, path: &str) -> KeySourceError {
        let at = nth_char(path, self.at);
        KeySourceError::Path { path: path.to_owned(), at, reason: self.reason }
    }

    pub(super) fn in_text(self, text: &str) -> KeySourceError {
        let at = nth_char(text, self.at);
        KeySourceError::Text { text: text.to_owned(), at, reason: self.reason }
    }
}

fn nth_char(text: &str, byte: usize) -> usize {
    text.char_indices().take_while(|(at, _)| *at < byte).count() + 1
}

/// A place in a text: "character 5", or "the end (character 9)".
struct At<'a>(&'a str, usize);

impl fmt::Display for At<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.chars().nth(self.1.saturating_sub(1)) {
            Some(_) => write!(f, "character {}", self.1),
            None => write!(f, "the end (character {})", self.1),
        }
    }
}

/// Shows a text of the configuration as it is, but for control characters, which would break the
/// line of a log.
struct Plain<'a>(&'a str);

impl fmt::Display for Plain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            if c.is_control() { write!(f, "{}", c.escape_debug())? } else { write!(f, "{c}")? }
        }
        Ok(())
    }
}

pub(super) const HEADER_NAME: &str =
    "a header name has letters, digits and any of !#$%&'*+-.^_`|~, and no more";
