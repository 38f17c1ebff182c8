//! The signature by which a target knows that a call is ours, as Standard Webhooks writes it.
//!
//! `http.rs` asks a [`Signer`] for the value of `webhook-signature`: for each secret `v1,` and the base64 of the HMAC-SHA256 of
//! `id.timestamp.body`, with a blank between. Several secrets are for the time in which a target changes from one to the next.

use base64::Engine as _;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, NO_PAD, STANDARD};
use hyper::header::HeaderValue;
use ring::hmac;

use crate::message::Secret;

/// A secret with fewer bytes could be guessed.
const SECRET_BYTES_MIN: usize = 16;

/// More secrets than a rotation needs would make the header long.
const SECRETS_MAX: usize = 8;

/// Secrets are handed around with and without the padding.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    NO_PAD.with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Signs calls; without a secret it signs nothing.
#[derive(Clone, Default)]
pub struct Signer {
    keys: Vec<hmac::Key>,
    /// The secrets as they are handed around, without what is in front: to be recognised in what a target answers.
    texts: Vec<Secret>,
}

/// Why a secret cannot be used. Does not repeat it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadSecret {
    /// Not base64.
    #[error("secret number {number} is not base64, with or without `whsec_` in front")]
    NotBase64 {
        /// Which one, from 1.
        number: usize,
    },
    /// Too short.
    #[error("secret number {number} has {bytes} bytes; at least {SECRET_BYTES_MIN} are needed")]
    TooShort {
        /// Which one, from 1.
        number: usize,
        /// How many it has.
        bytes: usize,
    },
    /// Too many of them.
    #[error("{0} secrets are more than the {SECRETS_MAX} that a rotation may have")]
    TooMany(usize),
}

impl Signer {
    /// Signs with each of these: base64, with or without `whsec_` in front.
    pub fn new(secrets: &[Secret]) -> Result<Self, BadSecret> {
        if secrets.len() > SECRETS_MAX {
            return Err(BadSecret::TooMany(secrets.len()));
        }
        let keys = secrets.iter().zip(1..).map(|(secret, number)| key(secret, number));
        let keys = keys.collect::<Result<_, _>>()?;
        Ok(Signer { keys, texts: secrets.iter().map(|secret| Secret::new(bare(secret))).collect() })
    }

    /// The secrets, as a target may know them.
    pub(super) fn secrets(&self) -> impl Iterator<Item = &str> {
        self.texts.iter().map(Secret::expose)
    }

    /// Whether it signs at all.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The value of `webhook-signature`.
    pub fn sign(&self, id: &str, timestamp: &str, body: &[u8]) -> HeaderValue {
        let mut value = String::with_capacity(self.keys.len() * 48);
        for key in &self.keys {
            let mut context = hmac::Context::with_key(key);
            for piece in [id.as_bytes(), b".", timestamp.as_bytes(), b".", body] {
                context.update(piece);
            }
            if !value.is_empty() {
                value.push(' ');
            }
            value.push_str("v1,");
            STANDARD.encode_string(context.sign(), &mut value);
        }
        HeaderValue::try_from(value).expect("base64, commas and blanks may stand in a header")
    }
}

fn bare(secret: &Secret) -> &str {
    let text = secret.expose().trim();
    text.strip_prefix("whsec_").unwrap_or(text)
}

fn key(secret: &Secret, number: usize) -> Result<hmac::Key, BadSecret> {
    let bytes = LENIENT.decode(bare(secret)).map_err(|_| BadSecret::NotBase64 { number })?;
    if bytes.len() < SECRET_BYTES_MIN {
        return Err(BadSecret::TooShort { number, bytes: bytes.len() });
    }
    Ok(hmac::Key::new(hmac::HMAC_SHA256, &bytes))
}

impl std::fmt::Debug for Signer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Signer({} secrets)", self.keys.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the Standard Webhooks documents.
    const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

    fn signer(secrets: &[&str]) -> Result<Signer, BadSecret> {
        Signer::new(&secrets.iter().copied().map(Secret::new).collect::<Vec<_>>())
    }

    #[test]
    fn signs_as_the_published_example_does() {
        let body = br#"{"test": 2432232314}"#;
        let signature = signer(&[SECRET]).unwrap().sign("msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", body);
        assert_eq!(signature, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn signs_with_every_secret_of_a_rotation() {
        let (old, new) = (SECRET, "c2l4dGVlbiBieXRlcyBhdCBsZWFzdA");
        let both = signer(&[old, new]).unwrap().sign("id", "1", b"body");
        let alone = |secret| signer(&[secret]).unwrap().sign("id", "1", b"body");
        let expected = format!("{} {}", alone(old).to_str().unwrap(), alone(new).to_str().unwrap());
        assert_eq!(both, expected.as_str());
        assert_eq!(alone(old), alone(SECRET.strip_prefix("whsec_").unwrap()), "the prefix is a label");
    }

    #[test]
    fn bad_secrets_are_named_by_number_and_not_repeated() {
        assert_eq!(signer(&[SECRET, "not base64!"]).unwrap_err(), BadSecret::NotBase64 { number: 2 });
        assert_eq!(signer(&["c2hvcnQ="]).unwrap_err(), BadSecret::TooShort { number: 1, bytes: 5 });
        assert_eq!(signer(&[SECRET; 9]).unwrap_err(), BadSecret::TooMany(9));
        assert!(signer(&[]).unwrap().is_empty());
    }

    #[test]
    fn secrets_are_not_in_the_debug_text() {
        assert_eq!(format!("{:?}", signer(&[SECRET]).unwrap()), "Signer(1 secrets)");
    }
}
