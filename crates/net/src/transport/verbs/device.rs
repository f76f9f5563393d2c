//! Chooses device, port and GID; lists the host's devices for `starctl doctor`.

use std::ffi::{CStr, c_int};
use std::io;
use std::net::Ipv6Addr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr;

use super::abi::*;
use super::error::VerbsError;
use super::library::Library;
use super::queue::set_nonblocking;
use super::shortages::Shortages;
use crate::transport::verbs::VerbsConfig;

/// The most rows of a GID table to examine.
const MAX_GIDS: u32 = 1024;

/// An open device, with the port and the address that connections use.
pub struct Device {
    pub(super) library: &'static Library,
    pub(super) context: ContextHandle,
    pub name: String,
    pub port: u8,
    pub gid_index: u8,
    pub gid: Gid,
    pub lid: u16,
    /// Packets carry a GRH: always on Ethernet.
    pub is_global: bool,
    /// As `enum ibv_mtu`.
    pub mtu: u8,
    /// Longest message.
    pub max_message: u32,
    pub limits: ibv_device_attr,
    pub shortages: Shortages,
}

/// An asynchronous event that means a failure.
#[derive(Clone, Copy, Debug)]
pub struct AsyncEvent {
    /// The address of the queue pair or completion queue that has failed; `None`: the whole device has.
    pub element: Option<u64>,
    pub what: &'static str,
}

/// A port of the host.
#[derive(Clone, Debug)]
pub struct PortFacts {
    pub device: String,
    pub port: u8,
    pub state: &'static str,
    pub is_active: bool,
    pub is_ethernet: bool,
    pub lid: u16,
    pub mtu: u32,
    pub max_mtu: u32,
    pub gids: Vec<GidFacts>,
}

#[derive(Clone, Debug)]
pub struct GidFacts {
    pub index: u32,
    pub gid: Ipv6Addr,
    pub is_roce_v2: bool,
}

/// Closes the context on drop.
pub(super) struct ContextHandle {
    library: &'static Library,
    pub raw: *mut ibv_context,
}

impl Drop for ContextHandle {
    fn drop(&mut self) {
        // SAFETY: opened by `open_device` and closed only here, after every object made from it: their owners hold the
        // `Device`.
        unsafe { (self.library.close_device)(self.raw) };
    }
}

impl Device {
    /// Opens the configured device, or the most suitable one.
    pub fn open(library: &'static Library, config: &VerbsConfig) -> Result<Device, VerbsError> {
        let list = DeviceList::get(library)?;
        let names: Vec<String> = list.iter().map(|device| list.name(device)).collect();
        if names.is_empty() {
            return Err(VerbsError::NoDevice);
        }
        if let Some(wanted) = &config.device {
            let unknown = || VerbsError::UnknownDevice { wanted: wanted.clone(), found: names.join(", ") };
            let device = list.iter().find(|device| list.name(*device) == *wanted).ok_or_else(unknown)?;
            return Opened::new(library, &list, device)?.into_device(config);
        }
        let mut seen = Vec::new();
        let mut failure = None;
        for device in list.iter() {
            match Opened::new(library, &list, device).and_then(|open| open.into_device(config)) {
                Ok(device) => return Ok(device),
                Err(VerbsError::PortDown { device, port, state }) => {
                    seen.push(format!("{device} port {port}: {state}"))
                }
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        Err(failure.unwrap_or_else(|| VerbsError::NoActivePort { seen: seen.join(", ") }))
    }

    pub fn describe(&self) -> String {
        let address = if self.is_global {
            format!("GID {} ({})", self.gid_index, Ipv6Addr::from(self.gid))
        } else {
            format!("LID {}", self.lid)
        };
        format!("{} port {}, {address}, MTU {}", self.name, self.port, mtu_bytes(self.mtu))
    }

    /// A descriptor that is readable while there are asynchronous events.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        // SAFETY: the context is open.
        let fd = unsafe { (*self.context.raw).async_fd };
        set_nonblocking(fd)?;
        // SAFETY: the descriptor is open as long as the context; the duplicate gets its own owner.
        unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()
    }

    /// The next event that means a failure. Call `descriptor` first: it makes this non-blocking.
    pub fn next_event(&self) -> Option<AsyncEvent> {
        loop {
            let mut event = ibv_async_event { element: 0, event_type: 0 };
            // SAFETY: an open context and a writable structure.
            if unsafe { (self.library.get_async_event)(self.context.raw, &mut event) } != 0 {
                return None;
            }
            // SAFETY: the event that was just taken; acknowledged once.
            unsafe { (self.library.ack_async_event)(&mut event) };
            let (element, what) = match event.event_type {
                EVENT_CQ_ERR => (Some(event.element), "a completion queue has overflowed"),
                EVENT_QP_FATAL => (Some(event.element), "a queue pair has failed"),
                EVENT_DEVICE_FATAL => (None, "the device has failed"),
                // A port may come back in time, which the retries of each queue pair decide; the other events do not
                // concern connections.
                _ => continue,
            };
            return Some(AsyncEvent { element, what });
        }
    }

    pub(super) fn raw(&self) -> *mut ibv_context {
        self.context.raw
    }
}

/// All ports of all devices of this host, or the reason why they cannot be listed.
pub fn survey(library: &'static Library) -> Result<Vec<Result<PortFacts, VerbsError>>, VerbsError> {
    let list = DeviceList::get(library)?;
    let mut found = Vec::new();
    for device in list.iter() {
        match Opened::new(library, &list, device) {
            Ok(open) => found.extend((1..=open.limits.phys_port_cnt).map(|port| open.facts(port))),
            Err(error) => found.push(Err(error)),
        }
    }
    Ok(found)
}

struct DeviceList {
    library: &'static Library,
    list: *mut *mut ibv_device,
    len: usize,
}

impl DeviceList {
    fn get(library: &'static Library) -> Result<Self, VerbsError> {
        let mut len: c_int = 0;
        // SAFETY: `len` is writable.
        let list = unsafe { (library.get_device_list)(&mut len) };
        if list.is_null() {
            let error = io::Error::last_os_error();
            // No uverbs at all: the kernel has no RDMA, or it is hidden from this container.
            return Err(match error.raw_os_error() {
                Some(libc::ENOSYS) => VerbsError::NoDevice,
                _ => VerbsError::List(error),
            });
        }
        Ok(Self { library, list, len: len.max(0).unsigned_abs() as usize })
    }

    fn iter(&self) -> impl Iterator<Item = *mut ibv_device> {
        // SAFETY: the library returned `len` entries, valid until the list is freed, which is when `self` is dropped.
        (0..self.len).map(|index| unsafe { *self.list.add(index) })
    }

    fn name(&self, device: *mut ibv_device) -> String {
        // SAFETY: `device` is an entry of the list; its name is zero-terminated and lives as long as the list.
        unsafe { CStr::from_ptr((self.library.get_device_name)(device)) }.to_string_lossy().into_owned()
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: from `get_device_list`, freed once. Freeing the list does not affect open devices.
        unsafe { (self.library.free_device_list)(self.list) };
    }
}

/// An open device whose port is not yet chosen.
struct Opened {
    library: &'static Library,
    context: ContextHandle,
    name: String,
    limits: ibv_device_attr,
}

impl Opened {
    fn new(library: &'static Library, list: &DeviceList, device: *mut ibv_device) -> Result<Self, VerbsError> {
        let name = list.name(device);
        // SAFETY: an entry of the list, which is alive.
        let raw = unsafe { (library.open_device)(device) };
        if raw.is_null() {
            return Err(VerbsError::Open { device: name, source: io::Error::last_os_error() });
        }
        let context = ContextHandle { library, raw };
        // SAFETY: all-zero is a valid value of this plain structure.
        let mut limits: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: an open context and a writable structure.
        let result = unsafe { (library.query_device)(raw, &mut limits) };
        check(result).map_err(|source| VerbsError::Query { device: name.clone(), what: "its limits", source })?;
        Ok(Self { library, context, name, limits })
    }

    fn port(&self, port: u8) -> Result<ibv_port_attr, VerbsError> {
        // SAFETY: all-zero is a valid value of this plain structure.
        let mut attr: ibv_port_attr = unsafe { std::mem::zeroed() };
        // SAFETY: an open context and a writable structure.
        let result = unsafe { (self.library.query_port)(self.context.raw, port, &mut attr) };
        check(result)
            .map_err(|source| VerbsError::Query { device: self.name.clone(), what: "its port", source })
            .map(|()| attr)
    }

    fn choose_port(&self, wanted: Option<u8>) -> Result<u8, VerbsError> {
        let ports = self.limits.phys_port_cnt;
        let device = || self.name.clone();
        let (first, last) = match wanted {
            Some(wanted) if wanted > ports => {
                return Err(VerbsError::UnknownPort { device: device(), wanted, ports });
            }
            Some(wanted) => (wanted, wanted),
            None => (1, ports),
        };
        let mut down = VerbsError::PortDown { device: device(), port: first, state: "no port" };
        for port in first..=last {
            let attr = self.port(port)?;
            if is_active(attr.state) {
                return Ok(port);
            }
            down = VerbsError::PortDown { device: device(), port, state: state_name(attr.state) };
        }
        Err(down)
    }

    /// A row of the GID table, and whether it is a RoCE v2 address. `None`: no such row, or empty.
    fn gid(&self, port: u8, index: u32) -> Option<(Gid, bool)> {
        let (gid, kind) = match self.library.query_gid_ex {
            Some(query) => {
                // SAFETY: all-zero is a valid value of this plain structure.
                let mut entry: ibv_gid_entry = unsafe { std::mem::zeroed() };
                let size = size_of::<ibv_gid_entry>();
                // SAFETY: an open context and a writable structure of the given size.
                let result = unsafe { query(self.context.raw, u32::from(port), index, &mut entry, 0, size) };
                if result != 0 {
                    return None;
                }
                (entry.gid.0, entry.gid_type)
            }
            None => {
                let mut gid = GidField([0; 16]);
                let row = c_int::try_from(index).ok()?;
                // SAFETY: an open context and a writable GID.
                if unsafe { (self.library.query_gid)(self.context.raw, port, row, &mut gid) } != 0 {
                    return None;
                }
                let folder = format!("/sys/class/infiniband/{}/ports/{port}/gid_attrs/types/{index}", self.name);
                let text = std::fs::read_to_string(folder).unwrap_or_default();
                (gid.0, if text.trim() == "RoCE v2" { GID_TYPE_ROCE_V2 } else { 0 })
            }
        };
        (gid != [0; 16]).then_some((gid, kind == GID_TYPE_ROCE_V2))
    }

    fn gids(&self, port: u8, attr: &ibv_port_attr) -> impl Iterator<Item = GidFacts> {
        let rows = attr.gid_tbl_len.max(0).unsigned_abs().min(MAX_GIDS);
        (0..rows).filter_map(move |index| {
            let (gid, is_roce_v2) = self.gid(port, index)?;
            Some(GidFacts { index, gid: Ipv6Addr::from(gid), is_roce_v2 })
        })
    }

    fn facts(&self, port: u8) -> Result<PortFacts, VerbsError> {
        let attr = self.port(port)?;
        let mtu = |code: c_int| u8::try_from(code).map_or(0, mtu_bytes);
        Ok(PortFacts {
            device: self.name.clone(),
            port,
            state: state_name(attr.state),
            is_active: is_active(attr.state),
            is_ethernet: attr.link_layer == LINK_LAYER_ETHERNET,
            lid: attr.lid,
            mtu: mtu(attr.active_mtu),
            max_mtu: mtu(attr.max_mtu),
            gids: self.gids(port, &attr).collect(),
        })
    }

    fn into_device(self, config: &VerbsConfig) -> Result<Device, VerbsError> {
        let port = self.choose_port(config.port)?;
        let attr = self.port(port)?;
        let is_ethernet = attr.link_layer == LINK_LAYER_ETHERNET;
        let (gid_index, gid) = match config.gid_index {
            Some(index) => {
                let unknown = || VerbsError::UnknownGid { device: self.name.clone(), port, index };
                (index, self.gid(port, index).ok_or_else(unknown)?.0)
            }
            None if is_ethernet => {
                let none = || VerbsError::NoGid { device: self.name.clone(), port };
                let best = best_gid(self.gids(port, &attr)).ok_or_else(none)?;
                (best.index, best.gid.octets())
            }
            None => (0, self.gid(port, 0).map_or([0; 16], |(gid, _)| gid)),
        };
        let has_no_row = || VerbsError::UnknownGid { device: self.name.clone(), port, index: gid_index };
        let port_mtu = mtu_of_port(attr.active_mtu);
        Ok(Device {
            gid_index: u8::try_from(gid_index).map_err(|_| has_no_row())?,
            gid,
            lid: attr.lid,
            is_global: is_ethernet || config.gid_index.is_some() || attr.lid == 0,
            mtu: config.mtu.map_or(port_mtu, |bytes| mtu_code(bytes).min(port_mtu)),
            max_message: attr.max_msg_sz.max(1 << 16),
            shortages: Shortages::of(&self.name),
            library: self.library,
            context: self.context,
            name: self.name,
            port,
            limits: self.limits,
        })
    }
}

/// RoCE v2 only. Networks route IPv4; link-local addresses reach only their own segment.
fn best_gid(gids: impl Iterator<Item = GidFacts>) -> Option<GidFacts> {
    let rank = |gid: &Ipv6Addr| match (gid.to_ipv4_mapped(), gid.is_unicast_link_local()) {
        (Some(_), _) => 0,
        (None, false) => 1,
        (None, true) => 2,
    };
    let mut best: Option<(u8, GidFacts)> = None;
    for found in gids.filter(|found| found.is_roce_v2) {
        let rank = rank(&found.gid);
        if best.as_ref().is_none_or(|(before, _)| rank < *before) {
            best = Some((rank, found));
        }
        if rank == 0 {
            break;
        }
    }
    best.map(|(_, found)| found)
}

pub(super) fn mtu_bytes(code: u8) -> u32 {
    128 << code.clamp(1, 5)
}

fn mtu_code(bytes: u32) -> u8 {
    match bytes {
        ..512 => 1,
        512..1024 => 2,
        1024..2048 => 3,
        2048..4096 => 4,
        4096.. => 5,
    }
}

/// Codes are 1 to 5; a provider that reports another one gets the nearest.
fn mtu_of_port(code: c_int) -> u8 {
    u8::try_from(code.max(1)).map_or(5, |code| code.min(5))
}

fn is_active(state: c_int) -> bool {
    matches!(state, PORT_ACTIVE | PORT_ACTIVE_DEFER)
}

fn state_name(state: c_int) -> &'static str {
    match state {
        1 => "down",
        2 => "initialising",
        3 => "armed",
        PORT_ACTIVE | PORT_ACTIVE_DEFER => "active",
        _ => "unknown",
    }
}

/// Most calls return an errno value; some return -1 and set errno.
pub(super) fn check(result: c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        code => Err(io::Error::from_raw_os_error(code.abs())),
    }
}

/// Calls that return pointers set errno when they return null.
pub(super) fn not_null<T>(pointer: *mut T) -> io::Result<ptr::NonNull<T>> {
    ptr::NonNull::new(pointer).ok_or_else(io::Error::last_os_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u32, text: &str, is_roce_v2: bool) -> GidFacts {
        GidFacts { index, gid: text.parse().unwrap(), is_roce_v2 }
    }

    #[test]
    fn an_ipv4_roce_v2_address_is_the_best_one() {
        let choose = |gids: Vec<GidFacts>| best_gid(gids.into_iter()).map(|best| best.index);
        let table = vec![
            gid(0, "fe80::1", false),
            gid(1, "fe80::1", true),
            gid(2, "::ffff:10.0.0.7", false),
            gid(3, "2001:db8::7", true),
            gid(4, "::ffff:10.0.0.7", true),
        ];
        assert_eq!(choose(table.clone()), Some(4));
        assert_eq!(choose(table[..4].to_vec()), Some(3));
        assert_eq!(choose(table[..2].to_vec()), Some(1));
        assert_eq!(choose(table[..1].to_vec()), None, "version 1 is not routed by anybody");
    }

    #[test]
    fn mtu_codes() {
        for (bytes, code) in [(256, 1), (512, 2), (1024, 3), (2048, 4), (4096, 5)] {
            assert_eq!((mtu_code(bytes), mtu_bytes(code)), (code, bytes));
        }
    }
}
