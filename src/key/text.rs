//! The text form of a source: `header:ce-source + header:ce-id | json:$.id`.

use std::{fmt, str::FromStr};

use http::HeaderName;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use super::{
    KeySource, KeySourceError, Node,
    fault::{Flaw, HEADER_NAME},
    idempotency,
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
            Node::IdempotencyKey => f.write_str(idempotency::NAME),
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
        self.skip_blanks();
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
            self.skip_blanks();
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
                idempotency::NAME => Ok(KeySource::idempotency_key()),
                "fn" => Err(Flaw::new(begin, "`fn` stands for a function, which has no text form")),
                word => match word.strip_prefix(idempotency::NAME) {
                    Some(rest) if rest.starts_with(['+', '|']) => {
                        Err(Flaw::new(begin + idempotency::NAME.len(), SPACED))
                    }
                    _ => Err(Flaw::new(begin, SOURCE)),
                },
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
            self.at = before;
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
                      `header:x-event-id`, `json:$.id` or `query:event`, or is `idempotency-key`";
const SPACED: &str = "`+` and `|` stand between white space, as in `header:a + header:b`";

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test may panic")]

    use proptest::prelude::*;

    use super::{super::path::Step, *};

    fn shown(text: &str) -> String {
        text.parse::<KeySource>().unwrap().to_string()
    }

    #[test]
    fn the_text_form_is_read_and_shown() {
        for text in [
            "header:x-github-delivery",
            "json:$.id",
            "json:$.message.messageId",
            "json:$['odd key'][0].id",
            "json:$['a + b | (c)']",
            "query:event",
            "query:event%20id",
            "idempotency-key",
            "idempotency-key + header:a | header:b",
            "(header:a | idempotency-key) + json:$.b",
            "header:idempotency-key",
            "header:ce-source + header:ce-id",
            "header:webhook-id | json:$.id",
            "header:a + header:b | header:c + header:d",
            "(header:a | header:b) + (header:c | query:d)",
            "(header:a + json:$.b | header:c) + header:d",
            // Both operators are characters of header names.
            "header:a+b + header:c|d",
            "header:+ | header:|",
        ] {
            assert_eq!(shown(text), text);
        }
        for (text, same) in [
            ("header:X-GitHub-Delivery", "header:x-github-delivery"),
            ("  json:$['id'] \n", "json:$.id"),
            ("json:$ .a ['b'] + header:c", "json:$.a.b + header:c"),
            ("((header:a))", "header:a"),
            ("( header:a )+ header:b", ""),
            ("(header:a + header:b) + header:c", "header:a + header:b + header:c"),
            ("header:a | (header:b | header:c)", "header:a | header:b | header:c"),
            ("header:a | (header:b + header:c)", "header:a | header:b + header:c"),
            ("header:a\t+\nheader:b", "header:a + header:b"),
            ("query:a+b", "query:a%2Bb"),
            ("query:%41é", "query:A%C3%A9"),
            ("query:a[id]", "query:a[id]"),
            ("(query:a)", "query:a"),
            ("(json:$)", "json:$"),
            (" (idempotency-key)", "idempotency-key"),
            ("idempotency-key\n| idempotency-key", "idempotency-key | idempotency-key"),
        ] {
            match same {
                "" => assert!(text.parse::<KeySource>().is_err(), "{text}"),
                same => assert_eq!(shown(text), same, "{text}"),
            }
        }
    }

    #[test]
    fn anything_else_is_refused_at_the_character() {
        for (text, at, reason) in [
            ("", 1, "begins with `header:`"),
            ("  ", 3, "begins with `header:`"),
            ("$.id", 1, "begins with `header:`"),
            ("cookie:a", 1, "begins with `header:`"),
            ("Header:a", 1, "begins with `header:`"),
            ("fn", 1, "no text form"),
            ("header:a | fn", 12, "no text form"),
            ("cookie:a", 1, "or is `idempotency-key`"),
            ("Idempotency-Key", 1, "or is `idempotency-key`"),
            ("idempotency-keys", 1, "or is `idempotency-key`"),
            ("idempotency-key:a", 1, "or is `idempotency-key`"),
            ("idempotency-key|header:a", 16, "white space"),
            ("header:a + idempotency-key+header:b", 27, "white space"),
            ("idempotency-key +header:a", 17, "white space"),
            ("idempotency-key header:a", 17, "stands between two"),
            ("idempotency-key(header:a)", 16, "stands between two"),
            ("header:", 8, "followed by the name"),
            ("header: a", 8, "followed by the name"),
            ("header:a b", 10, "stands between two"),
            ("header:é", 8, "a header name has"),
            ("header:a|header:b", 16, "white space"),
            ("header:a +header:b", 10, "white space"),
            ("header:a + ", 12, "begins with `header:`"),
            ("header:a +", 11, "begins with `header:`"),
            ("+ header:a", 1, "begins with `header:`"),
            ("header:a | | header:b", 12, "begins with `header:`"),
            ("(header:a", 10, "`)` is missing"),
            ("header:a)", 9, "not opened"),
            ("(header:a))", 11, "not opened"),
            ("()", 2, "begins with `header:`"),
            ("(header:a)+ header:b", 11, "white space"),
            ("header:a(b", 9, "stands between two"),
            ("json:", 6, "begins with `$`"),
            ("json:id", 6, "begins with `$`"),
            ("json:$.a*", 9, "odd-key"),
            ("json:$.a+header:b", 9, "odd-key"),
            ("json:$[0]+", 10, "goes on with"),
            ("json:$.é[*]", 10, "retry may group"),
            ("header:é | json:$..id", 8, "a header name has"),
            ("query:", 7, "followed by the name"),
            ("query:100%", 10, "write `%25`"),
            ("query:%+1", 7, "write `%25`"),
            ("query:%zz", 7, "write `%25`"),
            ("query:%é", 7, "write `%25`"),
            ("query:%FF", 7, "not UTF-8"),
        ] {
            let error = text.parse::<KeySource>().unwrap_err();
            let KeySourceError::Text { at: found, reason: why, .. } = &error else {
                panic!("{text}: {error:?}")
            };
            assert_eq!(*found, at, "{text}: {why}");
            assert!(why.contains(reason), "{text}: {why}");
        }
    }

    #[test]
    fn errors_say_where_and_what_to_do() {
        let error = "json:$.a..b".parse::<KeySource>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "`json:$.a..b` is no key source: at character 9: `..` searches at every depth and may \
             find many values, and a request needs one key; write the whole path"
        );
        let error = KeySource::json("$.é[*]").unwrap_err();
        assert!(
            error.to_string().starts_with(
                "`$.é[*]` is no path to one value: at character 5: `*` finds many values"
            ),
            "{error}"
        );
        let error = KeySource::json("$['a\n").unwrap_err();
        assert_eq!(
            error.to_string(),
            "`$['a\\n` is no path to one value: at character 5: a control character is written as \
             an escape"
        );
        let error = KeySource::json("$[").unwrap_err();
        assert!(error.to_string().contains(": at the end (character 3): "), "{error}");
        let error = KeySource::header("x id").unwrap_err();
        assert!(error.to_string().starts_with("`x id` is no header name; "), "{error}");
        let error = KeySource::query("").unwrap_err();
        assert!(error.to_string().contains("such as `event`"), "{error}");
    }

    #[test]
    fn parentheses_have_a_bound() {
        let nested = |deep| format!("{}header:a{}", "(".repeat(deep), ")".repeat(deep));
        assert_eq!(shown(&nested(32)), "header:a");
        assert!(nested(33).parse::<KeySource>().unwrap_err().to_string().contains("32 deep"));
        assert!("(".repeat(1_000_000).parse::<KeySource>().is_err());
        // The bound is on depth, not on number.
        assert!(format!("{}header:a", "(header:a) | ".repeat(100)).parse::<KeySource>().is_ok());
    }

    /// Equality that does not look at the text form.
    fn same(a: &KeySource, b: &KeySource) -> bool {
        match (&*a.0, &*b.0) {
            (Node::Header(a), Node::Header(b)) => a == b,
            (Node::Json(a), Node::Json(b)) => a == b,
            (Node::Query(a), Node::Query(b)) => a == b,
            (Node::IdempotencyKey, Node::IdempotencyKey) => true,
            (Node::All(a), Node::All(b)) | (Node::Any(a), Node::Any(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b))
            }
            _ => false,
        }
    }

    fn sources() -> impl Strategy<Value = KeySource> {
        let step =
            prop_oneof![any::<String>().prop_map(Step::Name), (-9..9_i64).prop_map(Step::Index)];
        let one = prop_oneof![
            "[a-zA-Z0-9!#$%&'*+.^_`|~-]{1,12}".prop_map(|name| KeySource::header(name).unwrap()),
            prop::collection::vec(step, 0..4)
                .prop_map(|steps| KeySource::of(Node::Json(Path::of(steps)))),
            prop_oneof![".{1,9}", "[ +|()%&=\\n:]{1,9}"]
                .prop_filter("named", |name| !name.is_empty())
                .prop_map(|name| KeySource::query(name).unwrap()),
            Just(KeySource::idempotency_key()),
        ];
        one.prop_recursive(5, 24, 2, |source| {
            (source.clone(), source, any::<bool>())
                .prop_map(|(a, b, and)| if and { a.and(b) } else { a.or(b) })
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        #[test]
        fn what_is_shown_is_read_again(source in sources()) {
            let text = source.to_string();
            let read: KeySource = text.parse().unwrap();
            prop_assert!(same(&source, &read), "{} became {}", text, read);
            prop_assert_eq!(read.to_string(), text);
        }

        #[test]
        fn no_text_makes_the_parser_panic(
            text in "(header:|json:\\$|query:|idempotency-key|[()+| .%a*\\[\\]'é-]){0,12}|.*",
        ) {
            if let Ok(source) = text.parse::<KeySource>() {
                prop_assert!(source.to_string().parse::<KeySource>().is_ok());
            }
        }
    }
}
