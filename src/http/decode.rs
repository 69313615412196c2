//! Looking into compressed bodies. What is handed on stays as it was sent.

use std::borrow::Cow;

use http::{HeaderMap, header::CONTENT_ENCODING};

use super::answer::Refusal;

/// The body without its content codings, at most `limit` bytes of it.
pub(super) fn for_looking<'a>(
    headers: &HeaderMap,
    data: &'a [u8],
    limit: usize,
) -> Result<Cow<'a, [u8]>, Refusal> {
    let mut body = Cow::Borrowed(data);
    if data.is_empty() {
        return Ok(body);
    }
    let codings = codings(headers)?;
    if codings.len() > MAX_CODINGS {
        return Err(Refusal::Encoding(format!("more than {MAX_CODINGS} content codings")));
    }
    // They were applied in the order in which they are listed.
    for coding in codings.iter().rev() {
        body = Cow::Owned(decoded(coding, &body, limit)?);
    }
    Ok(body)
}

/// The content codings of a body, in lower case, in the order in which they were applied.
fn codings(headers: &HeaderMap) -> Result<Vec<String>, Refusal> {
    let mut codings = Vec::new();
    for value in headers.get_all(CONTENT_ENCODING) {
        let value = value
            .to_str()
            .map_err(|_| Refusal::Encoding("content-encoding is not ASCII text".into()))?;
        let named = value.split(',').map(|coding| coding.trim().to_ascii_lowercase());
        codings.extend(named.filter(|coding| !coding.is_empty() && coding != "identity"));
    }
    Ok(codings)
}

#[cfg(feature = "decode")]
fn decoded(coding: &str, data: &[u8], limit: usize) -> Result<Vec<u8>, Refusal> {
    use std::io::Read;

    let mut plain = Vec::new();
    let most = limit as u64 + 1;
    let read = match coding {
        "gzip" | "x-gzip" => {
            flate2::read::MultiGzDecoder::new(data).take(most).read_to_end(&mut plain)
        }
        // RFC 9110 says zlib; some senders send the bare deflate stream.
        "deflate" if looks_like_zlib(data) => {
            flate2::read::ZlibDecoder::new(data).take(most).read_to_end(&mut plain)
        }
        "deflate" => flate2::read::DeflateDecoder::new(data).take(most).read_to_end(&mut plain),
        "br" => brotli_decompressor::Decompressor::new(data, BROTLI_BUFFER)
            .take(most)
            .read_to_end(&mut plain),
        "zstd" => zstd(data, most, &mut plain),
        _ => return Err(not_supported(coding)),
    };
    match read {
        Err(_) => Err(Refusal::InvalidKey(format!("the body does not decode as {coding}"))),
        Ok(_) if plain.len() > limit => Err(Refusal::BodyTooLarge { limit }),
        Ok(_) => Ok(plain),
    }
}

#[cfg(not(feature = "decode"))]
fn decoded(coding: &str, _: &[u8], _: usize) -> Result<Vec<u8>, Refusal> {
    Err(not_supported(coding))
}

fn not_supported(coding: &str) -> Refusal {
    Refusal::Encoding(format!(
        "content-encoding {coding:?} cannot be looked into to find the event key; \
         send the body as it is{}",
        if cfg!(feature = "decode") { ", or as gzip, deflate, br or zstd" } else { "" },
    ))
}

/// Decodes all frames, as a decoder of a stream does.
#[cfg(feature = "decode")]
fn zstd(mut data: &[u8], most: u64, plain: &mut Vec<u8>) -> std::io::Result<usize> {
    use std::io::{Error, Read};

    while !data.is_empty() && (plain.len() as u64) < most {
        let frame = ruzstd::decoding::StreamingDecoder::new(&mut data).map_err(Error::other)?;
        frame.take(most - plain.len() as u64).read_to_end(plain)?;
    }
    Ok(plain.len())
}

/// A zlib header says "deflate" in its first byte, and its first two are a multiple of 31.
#[cfg(feature = "decode")]
fn looks_like_zlib(data: &[u8]) -> bool {
    match data {
        [first, second, ..] => first & 0x0f == 8 && u16::from_be_bytes([*first, *second]) % 31 == 0,
        _ => false,
    }
}

const MAX_CODINGS: usize = 3;
#[cfg(feature = "decode")]
const BROTLI_BUFFER: usize = 4096;
