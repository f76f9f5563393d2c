//! An address in the kernel's form.

use std::ffi::OsStr;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use super::SocketAddress;

/// A `sockaddr` of any family, with its length.
#[derive(Clone)]
pub struct RawAddress {
    storage: libc::sockaddr_storage,
    len: libc::socklen_t,
}

/// The size of a structure, as the socket calls take it.
pub(crate) const fn socklen<T>() -> libc::socklen_t {
    const { assert!(size_of::<T>() <= libc::socklen_t::MAX as usize) };
    #[expect(clippy::cast_possible_truncation, reason = "asserted")]
    let len = size_of::<T>() as libc::socklen_t;
    len
}

/// A family, as the structures hold it.
const fn family(number: libc::c_int) -> libc::sa_family_t {
    assert!(number >= 0 && number <= libc::sa_family_t::MAX as libc::c_int);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "asserted")]
    let family = number as libc::sa_family_t;
    family
}

const INET: libc::sa_family_t = family(libc::AF_INET);
const INET6: libc::sa_family_t = family(libc::AF_INET6);
const UNIX: libc::sa_family_t = family(libc::AF_UNIX);

impl RawAddress {
    pub fn new(address: &SocketAddress) -> io::Result<Self> {
        let mut raw = RawAddress::empty();
        match address {
            SocketAddress::Inet(SocketAddr::V4(v4)) => raw.put(libc::sockaddr_in {
                sin_family: INET,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                sin_zero: [0; 8],
            }),
            SocketAddress::Inet(SocketAddr::V6(v6)) => raw.put(libc::sockaddr_in6 {
                sin6_family: INET6,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            }),
            SocketAddress::Unix(path) => {
                let mut name = path.as_os_str().as_bytes().to_vec();
                let mut raw_unix = libc::sockaddr_un { sun_family: UNIX, sun_path: [0; 108] };
                if name.is_empty() || name.contains(&0) || name.len() >= raw_unix.sun_path.len() {
                    let reason = format!("no usable unix socket path: \"{}\"", path.display());
                    return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
                }
                // An abstract name starts with a zero byte and has an explicit length; a path ends with a zero byte.
                let is_abstract = name[0] == b'@';
                if is_abstract {
                    name[0] = 0;
                } else {
                    name.push(0);
                }
                for (to, from) in raw_unix.sun_path.iter_mut().zip(&name) {
                    *to = libc::c_char::from_ne_bytes([*from]);
                }
                raw.put(raw_unix);
                let len = std::mem::offset_of!(libc::sockaddr_un, sun_path) + name.len();
                raw.len = len.try_into().map_err(io::Error::other)?;
            }
        }
        Ok(raw)
    }

    /// To be filled by a system call through `as_mut_ptr` and `size_mut`.
    pub fn empty() -> Self {
        // SAFETY: all-zero is a valid sockaddr_storage (of no family).
        let storage = unsafe { std::mem::zeroed() };
        RawAddress { storage, len: socklen::<libc::sockaddr_storage>() }
    }

    /// Decodes the address; `None` for families that we do not use and for sockets without a name.
    pub fn decode(&self) -> Option<SocketAddress> {
        let len = self.len as usize;
        match libc::c_int::from(self.storage.ss_family) {
            libc::AF_INET if len >= size_of::<libc::sockaddr_in>() => {
                let v4: libc::sockaddr_in = self.view();
                let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
                Some(SocketAddress::Inet(SocketAddr::V4(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)))))
            }
            libc::AF_INET6 if len >= size_of::<libc::sockaddr_in6>() => {
                let v6: libc::sockaddr_in6 = self.view();
                let (ip, port) = (Ipv6Addr::from(v6.sin6_addr.s6_addr), u16::from_be(v6.sin6_port));
                let v6 = SocketAddrV6::new(ip, port, v6.sin6_flowinfo, v6.sin6_scope_id);
                Some(SocketAddress::Inet(SocketAddr::V6(v6)))
            }
            libc::AF_UNIX => {
                let raw: libc::sockaddr_un = self.view();
                let bytes = len.checked_sub(std::mem::offset_of!(libc::sockaddr_un, sun_path))?;
                let mut name: Vec<u8> = raw.sun_path.iter().take(bytes).flat_map(|byte| byte.to_ne_bytes()).collect();
                if name.first() == Some(&0) && name.len() > 1 {
                    name[0] = b'@';
                } else {
                    name.truncate(name.iter().position(|byte| *byte == 0).unwrap_or(name.len()));
                }
                (!name.is_empty()).then(|| SocketAddress::Unix(PathBuf::from(OsStr::from_bytes(&name))))
            }
            _ => None,
        }
    }

    pub fn family(&self) -> libc::c_int {
        self.storage.ss_family.into()
    }

    pub fn as_ptr(&self) -> *const libc::sockaddr {
        (&raw const self.storage).cast()
    }

    pub fn as_mut_ptr(&mut self) -> *mut libc::sockaddr {
        (&raw mut self.storage).cast()
    }

    pub fn size(&self) -> libc::socklen_t {
        self.len
    }

    pub fn size_mut(&mut self) -> &mut libc::socklen_t {
        &mut self.len
    }

    fn put<T: Copy>(&mut self, address: T) {
        const { assert!(size_of::<T>() <= size_of::<libc::sockaddr_storage>()) };
        // SAFETY: sockaddr_storage is large enough (asserted) and aligned for any sockaddr.
        unsafe { (&raw mut self.storage).cast::<T>().write(address) };
        self.len = socklen::<T>();
    }

    fn view<T: Copy>(&self) -> T {
        const { assert!(size_of::<T>() <= size_of::<libc::sockaddr_storage>()) };
        // SAFETY: large enough (asserted), aligned and initialised; every sockaddr is plain data, valid for any bytes.
        unsafe { (&raw const self.storage).cast::<T>().read() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_kernels_form() {
        let inet = |text: &str| SocketAddress::Inet(text.parse().unwrap());
        for address in [
            inet("1.2.3.4:5"),
            inet("[2001:db8::7]:65535"),
            inet("[fe80::1%3]:80"),
            SocketAddress::Unix("/a/path".into()),
            SocketAddress::Unix("@a name".into()),
            SocketAddress::Unix(format!("/{}", "x".repeat(106)).into()),
        ] {
            assert_eq!(RawAddress::new(&address).unwrap().decode(), Some(address));
        }
    }

    #[test]
    fn unusable_paths_are_refused() {
        for path in ["".into(), "/zero\0".into(), format!("/{}", "x".repeat(107))] {
            assert!(RawAddress::new(&SocketAddress::Unix(path.into())).is_err());
        }
    }
}
