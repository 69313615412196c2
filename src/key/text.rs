//! The text form of a source: `header:ce-source + header:ce-id | json:$.id`.

use std::{fmt, str::FromStr};

use http::HeaderName;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use super::{
    KeySource, KeySourceError, Node,
    fault::{Flaw, HEADER_NAME},
    path::{Path, is_blank},
};

/// Shows the text form. [`FromStr`] reads it again into the same source, but for functions, which
/// are shown as `fn` and cannot be read, and for parentheses more than 32 deep.
impl fmt::Display for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0 {
            Node::Header(name) => write!(f, "header:{name}"),
            Node::Json(path) => write!(f, "json:{path}"),
            Node::Query(name) => write!(f, "query:{}", utf8_percent_encode(name, ENCODED)),
            Node::Head(_) | Node::Body(_) => f.write_str("fn"),
            Node::All(sources) => joined(f, sources, " + "),
            Node::Any(sources) => joined(f, sources, " | "),
        }
    }
}

fn joined(f: &mut fmt::Formatter<'_>, sources: &[KeySource], operator: &str) -> fmt::Result {
    for (at, source) in sources.iter().enumerate() {
        if at > 0 {
            f.write_str(operator)?;
        }
        // Only an `or` inside an `and` needs them: `+` binds tighter.
        if operator == " + " && matches!(*source.0, Node::Any(_)) {
            write!(f, "({source})")?;
        } else {
            write!(f, "{source}")?;
        }
    }
    Ok(())
}

/// Reads the [text form](crate::key#the-text-form).
impl FromStr for KeySource {
    type Err = KeySourceError;

    fn from_str(text: &str) -> Result<Self, KeySourceError> {
        let mut parser = Parser { text, at: 0, depth: 0 };
        parser.whole().map_err(|flaw| flaw.in_text(text))
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    /// The parentheses that are open.
    depth: usize,
}

impl<'a> Parser<'a> {
    fn whole(&mut self) -> Result<KeySource, Flaw> {
        let source = self.any()?;
        match self.peek() {
            None => Ok(source),
            Some(')') => Err(self.flaw("this parenthesis was not opened")),
            Some(_) => Err(self.flaw("` + ` or ` | ` stands between two sources")),
        }
    }

    /// `all | all | …`
    fn any(&mut self) -> Result<KeySource, Flaw> {
        let mut source = self.all()?;
        while self.operator('|')? {
            source = source.or(self.all()?);
        }
        Ok(source)
    }

    /// `one + one + …`
    fn all(&mut self) -> Result<KeySource, Flaw> {
        let mut source = self.one()?;
        while self.operator('+')? {
            source = source.and(self.one()?);
        }
        Ok(source)
    }

    /// A source without operators, or any in parentheses.
    fn one(&mut self) -> Result<KeySource, Flaw> {
        self.skip_blanks();
        let begin = self.at;
        if self.eat("(") {
            self.depth += 1;
            if self.depth > MAX_DEPTH {
                return Err(Flaw::new(begin, format!("parentheses go {MAX_DEPTH} deep at most")));
            }
            let source = self.any()?;
            if !self.eat(")") {
                return Err(self.flaw("`)` is missing"));
            }
            self.depth -= 1;
            Ok(source)
        } else if self.eat("header:") {
            self.header()
        } else if self.eat("json:") {
            let (path, end) = Path::read(self.text, self.at)?;
            self.at = end;
            match self.peek() {
                None | Some(')') => Ok(KeySource::of(Node::Json(path))),
                Some(c) if is_blank(c) => Ok(KeySource::of(Node::Json(path))),
                Some(_) => Err(self.flaw("a path goes on with `.name`, `['name']` or `[index]`")),
            }
        } else if self.eat("query:") {
            self.query()
        } else {
            match self.word() {
                "fn" => Err(Flaw::new(begin, "`fn` stands for a function, which has no text form")),
                _ => Err(Flaw::new(begin, SOURCE)),
            }
        }
    }

    fn header(&mut self) -> Result<KeySource, Flaw> {
        let begin = self.at;
        let word = self.word();
        if word.is_empty() {
            return Err(Flaw::new(begin, "`header:` is followed by the name of a header"));
        }
        HeaderName::from_bytes(word.as_bytes())
            .map(|name| KeySource::of(Node::Header(name)))
            .map_err(|_| match word.find(|c: char| !is_token(c)) {
                Some(at) if word.get(at..).is_some_and(|rest| rest.starts_with(':')) => {
                    Flaw::new(begin + at, SPACED)
                }
                Some(at) => Flaw::new(begin + at, HEADER_NAME),
                None => Flaw::new(begin, "this name is too long for a header"),
            })
    }

    fn query(&mut self) -> Result<KeySource, Flaw> {
        let begin = self.at;
        let word = self.word();
        if word.is_empty() {
            return Err(Flaw::new(begin, "`query:` is followed by the name of a parameter"));
        }
        for (at, _) in word.match_indices('%') {
            let digits = word.get(at + 1..at + 3).unwrap_or_default();
            if digits.len() != 2 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Err(Flaw::new(
                    begin + at,
                    "`%` begins an escape such as `%20`; write `%25`",
                ));
            }
        }
        match percent_decode_str(word).decode_utf8() {
            Ok(name) => Ok(KeySource::of(Node::Query(name.into_owned()))),
            Err(_) => Err(Flaw::new(begin, "the escapes in this name are not UTF-8")),
        }
    }

    /// Whether this operator comes next, between white space.
    fn operator(&mut self, operator: char) -> Result<bool, Flaw> {
        let before = self.at;
        self.skip_blanks();
        if self.peek() != Some(operator) {
            return Ok(false);
        }
        let at = self.at;
        self.at += operator.len_utf8();
        if at == before || !self.peek().is_none_or(is_blank) {
            return Err(Flaw::new(at, SPACED));
        }
        Ok(true)
    }

    fn rest(&self) -> &'a str {
        self.text.get(self.at..).unwrap_or_default()
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn eat(&mut self, wanted: &str) -> bool {
        let is_there = self.rest().starts_with(wanted);
        if is_there {
            self.at += wanted.len();
        }
        is_there
    }

    fn skip_blanks(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start_matches(is_blank).len();
    }

    /// All up to white space, a parenthesis or the end.
    fn word(&mut self) -> &'a str {
        let rest = self.rest();
        let end = rest.find(|c| is_blank(c) || matches!(c, '(' | ')')).unwrap_or(rest.len());
        self.at += end;
        rest.get(..end).unwrap_or_default()
    }

    fn flaw(&self, reason: &'static str) -> Flaw {
        Flaw::new(self.at, reason)
    }
}

/// The characters of a header name (`token` in RFC 9110).
fn is_token(c: char) -> bool {
    c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c)
}

/// What is written as it is in the name of a query parameter: little, so that nothing can be taken
/// for an operator or a parenthesis.
const ENCODED: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'[').remove(b']');

const MAX_DEPTH: usize = 32;

const SOURCE: &str = "a source begins with `header:`, `json:` or `query:`, as in \
                      `header:x-event-id`, `json:$.id` or `query:event`";
const SPACED: &str = "`+` and `|` stand between white space, as in `header:a + header:b`";
