//! Finds one value in a JSON body: no tree, no float, no recursion.
//!
//! Each step of the path reads its object or array once, shallowly: what is not on the way is
//! skipped by serde_json, which checks it without keeping it and without recursing. The first step
//! reads the whole body, so the later ones read what is known to be JSON.

use std::{collections::VecDeque, fmt};

use serde::{
    Deserializer as _,
    de::{IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::value::RawValue;

use super::{
    fault::Problem,
    path::{Path, Step},
};

/// The text of the string, or the digits of the integer, that the path leads to.
pub(super) fn find(path: &Path, body: &[u8]) -> Result<String, Problem> {
    let body = body.strip_prefix(BYTE_ORDER_MARK).unwrap_or(body);
    let text = std::str::from_utf8(body).map_err(|_| Problem::NotUtf8Json)?;
    if text.bytes().all(is_white_space) {
        return Err(Problem::EmptyBody);
    }
    let mut value = text;
    for (depth, step) in path.steps().iter().enumerate() {
        let wanted = match step {
            Step::Name(_) => b'{',
            Step::Index(_) => b'[',
        };
        if kind(value) != Some(wanted) {
            if depth == 0 {
                whole(text)?;
            }
            return Err(Problem::NothingThere);
        }
        let found = match step {
            Step::Name(name) => member(value, name)?,
            Step::Index(index) => element(value, *index)?,
        };
        value = found.ok_or(Problem::NothingThere)?.get();
    }
    if path.steps().is_empty() {
        value = whole(text)?.get();
    }
    key(value)
}

/// What a value says of itself as a key. The value is valid JSON without white space around it.
fn key(value: &str) -> Result<String, Problem> {
    match kind(value) {
        // The only fault that skipping a string does not find.
        Some(b'"') => serde_json::from_str(value).map_err(|_| Problem::LoneSurrogate),
        Some(b'n') => Err(Problem::Null),
        Some(b't' | b'f') => Err(Problem::Boolean),
        Some(b'{') => Err(Problem::Object),
        Some(b'[') => Err(Problem::Array),
        _ if value.contains(['.', 'e', 'E']) => Err(Problem::Fraction),
        _ => Ok(value.to_owned()),
    }
}

/// The byte that a value begins with, which tells its type.
fn kind(value: &str) -> Option<u8> {
    value.bytes().find(|byte| !is_white_space(*byte))
}

fn is_white_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

fn whole(text: &str) -> Result<&RawValue, Problem> {
    serde_json::from_str(text).map_err(not_json)
}

fn not_json(error: serde_json::Error) -> Problem {
    Problem::NotJson { line: error.line(), column: error.column() }
}

/// The member of that name of the object that `text` is.
fn member<'a>(text: &'a str, name: &str) -> Result<Option<&'a RawValue>, Problem> {
    let mut json = serde_json::Deserializer::from_str(text);
    let found = json.deserialize_map(Member { name }).and_then(|found| json.end().map(|()| found));
    let (found, twice) = found.map_err(not_json)?;
    // Parsers disagree on which of two members counts. If we took one and the handler's parser
    // the other, an event could be swallowed under the id of another.
    if twice { Err(Problem::TwiceNamed { name: name.to_owned() }) } else { Ok(found) }
}

/// The element at that index, from the end if it is negative, of the array that `text` is.
fn element(text: &str, index: i64) -> Result<Option<&RawValue>, Problem> {
    let mut json = serde_json::Deserializer::from_str(text);
    let found = if index < 0 {
        json.deserialize_seq(FromEnd { back: index.unsigned_abs(), last: VecDeque::new() })
    } else {
        json.deserialize_seq(FromStart { index: index.unsigned_abs() })
    };
    found.and_then(|found| json.end().map(|()| found)).map_err(not_json)
}

struct Member<'n> {
    name: &'n str,
}

impl<'de> Visitor<'de> for Member<'_> {
    /// The last member of the name, and whether there was one before.
    type Value = (Option<&'de RawValue>, bool);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        let mut twice = false;
        while let Some(name) = map.next_key::<&RawValue>()? {
            if is_name(name.get(), self.name) {
                twice |= found.replace(map.next_value()?).is_some();
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok((found, twice))
    }
}

/// Whether a JSON string, in its quotes, says this name. One with half a surrogate pair says none.
fn is_name(raw: &str, name: &str) -> bool {
    if raw.contains('\\') {
        return serde_json::from_str::<String>(raw).is_ok_and(|said| said == name);
    }
    raw.strip_prefix('"').and_then(|raw| raw.strip_suffix('"')) == Some(name)
}

struct FromStart {
    index: u64,
}

impl<'de> Visitor<'de> for FromStart {
    type Value = Option<&'de RawValue>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        for _ in 0..self.index {
            if seq.next_element::<IgnoredAny>()?.is_none() {
                return Ok(None);
            }
        }
        let found = seq.next_element()?;
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(found)
    }
}

struct FromEnd<'de> {
    back: u64,
    /// The last elements so far, at most `back` of them.
    last: VecDeque<&'de RawValue>,
}

impl<'de> Visitor<'de> for FromEnd<'de> {
    type Value = Option<&'de RawValue>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut seen: u64 = 0;
        while let Some(element) = seq.next_element()? {
            if seen >= self.back {
                self.last.pop_front();
            }
            self.last.push_back(element);
            seen += 1;
        }
        Ok(if seen < self.back { None } else { self.last.pop_front() })
    }
}

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
