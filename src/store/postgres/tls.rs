//! TLS to the server, by rustls, as libpq's `sslmode` wants it.

use std::sync::Arc;

use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject},
};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::connect::Verify;

/// A connector that checks the server's certificate as `verify` says.
pub(super) fn connector(
    verify: Verify,
    roots: Option<&str>,
) -> Result<MakeRustlsConnect, Box<dyn std::error::Error + Send + Sync>> {
    let provider = Arc::new(ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()?;
    let chain = match verify {
        Verify::ChainAndName => {
            let config = config.with_root_certificates(root_certificates(roots)?);
            return Ok(MakeRustlsConnect::new(config.with_no_client_auth()));
        }
        Verify::Chain => {
            let roots = Arc::new(root_certificates(roots)?);
            let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider.clone());
            Some(verifier.build()?)
        }
        Verify::Nothing => None,
    };
    let verifier = Arc::new(Lenient { chain, provider });
    let config = config.dangerous().with_custom_certificate_verifier(verifier);
    Ok(MakeRustlsConnect::new(config.with_no_client_auth()))
}

/// The certificates of a PEM file, or the operating system's.
fn root_certificates(
    file: Option<&str>,
) -> Result<RootCertStore, Box<dyn std::error::Error + Send + Sync>> {
    let mut store = RootCertStore::empty();
    match file {
        Some(path) if path != "system" => {
            let certificates = CertificateDer::pem_file_iter(path)
                .map_err(|error| format!("could not read sslrootcert {path:?}: {error}"))?;
            for certificate in certificates {
                let certificate =
                    certificate.map_err(|error| format!("sslrootcert {path:?}: {error}"))?;
                store.add(certificate).map_err(|error| format!("sslrootcert {path:?}: {error}"))?;
            }
            if store.is_empty() {
                return Err(format!("sslrootcert {path:?} has no certificate").into());
            }
        }
        _ => {
            let found = rustls_native_certs::load_native_certs();
            store.add_parsable_certificates(found.certs);
            if store.is_empty() {
                let errors: Vec<_> = found.errors.iter().map(ToString::to_string).collect();
                return Err(format!(
                    "the operating system has no root certificates; name a file with sslrootcert: {}",
                    errors.join(", "),
                )
                .into());
            }
        }
    }
    Ok(store)
}

/// Checks less of a certificate than rustls does by itself: nothing, for `prefer` and `require`,
/// which encrypt and do not authenticate; or the chain and not the name, for `verify-ca`.
#[derive(Debug)]
struct Lenient {
    chain: Option<Arc<WebPkiServerVerifier>>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Lenient {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let Some(chain) = &self.chain else { return Ok(ServerCertVerified::assertion()) };
        // The name is looked at last, once the chain has been found good.
        match chain.verify_server_cert(certificate, intermediates, name, ocsp, now) {
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
