//! Owned handles to queue pairs, their completion queue and registered memory.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::rc::Rc;

use super::abi::*;
use super::device::{Device, check, not_null};
use super::error::VerbsError;
use super::wire::Endpoint;
use crate::transport::verbs::VerbsConfig;

/// Retries of a packet that finds no buffer. Buffers are counted, so this does not happen between well-behaved peers.
const RNR_RETRIES: u8 = 6;
/// 0.64 ms.
const RNR_TIMER: u8 = 12;
/// READs in flight per connection, if the devices support it.
const MAX_READS: u8 = 16;
const POLLED: u8 = 32;

/// Delivers a reactor's completion events.
pub struct CompletionChannel {
    device: Rc<Device>,
    raw: NonNull<ibv_comp_channel>,
}

impl CompletionChannel {
    pub fn new(device: &Rc<Device>) -> Result<Rc<Self>, VerbsError> {
        // SAFETY: an open context.
        let raw = unsafe { (device.library.create_comp_channel)(device.raw()) };
        let lacks = |source| VerbsError::lacks(&device.name, "completion channel", source);
        let channel = CompletionChannel { device: device.clone(), raw: not_null(raw).map_err(lacks)? };
        // SAFETY: the channel is alive: `channel` owns it.
        let fd = unsafe { channel.raw.as_ref() }.fd;
        set_nonblocking(fd).map_err(lacks)?;
        Ok(Rc::new(channel))
    }

    /// A descriptor that is readable while there are events.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        // SAFETY: the channel is alive and its descriptor open; the duplicate gets its own owner.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().fd) }.try_clone_to_owned()
    }

    /// The key of the next queue pair whose queue has completions.
    pub fn next_event(&self) -> Option<u64> {
        let (mut cq, mut key) = (ptr::null_mut(), ptr::null_mut());
        let library = self.device.library;
        // SAFETY: the channel is alive, both results are writable; it does not block (set in `new`).
        if unsafe { (library.get_cq_event)(self.raw.as_ptr(), &mut cq, &mut key) } != 0 {
            return None;
        }
        // SAFETY: the completion queue of the event just taken; each event is acknowledged once.
        unsafe { (library.ack_cq_events)(cq, 1) };
        Some(key as u64)
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: created in `new`; every completion queue holds the channel, so all are destroyed by now.
        unsafe { (self.device.library.destroy_comp_channel)(self.raw.as_ptr()) };
    }
}

pub fn set_nonblocking(fd: i32) -> io::Result<()> {
    // SAFETY: takes no pointers.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: as above.
    if flags < 0 || unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// One protection domain per peer: its keys are useless to any other peer.
pub struct Domain {
    pub(super) device: Rc<Device>,
    raw: NonNull<ibv_pd>,
}

impl Domain {
    pub fn new(device: &Rc<Device>) -> Result<Rc<Self>, VerbsError> {
        // SAFETY: an open context.
        let raw = unsafe { (device.library.alloc_pd)(device.raw()) };
        let raw = not_null(raw).map_err(|source| VerbsError::lacks(&device.name, "protection domain", source))?;
        Ok(Rc::new(Domain { device: device.clone(), raw }))
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: regions and queue pairs hold their domain, so all are destroyed by now.
        unsafe { (self.device.library.dealloc_pd)(self.raw.as_ptr()) };
    }
}

/// Registered memory: the device may access it.
pub struct Region {
    domain: Rc<Domain>,
    raw: NonNull<ibv_mr>,
}

impl Region {
    /// # Safety
    /// The memory is valid, and stays so until the region is dropped.
    pub unsafe fn new(domain: &Rc<Domain>, ptr: *mut u8, len: usize, access: i32) -> Result<Self, VerbsError> {
        let device = &domain.device;
        // SAFETY: a live domain; the caller guarantees that the memory stays valid.
        let raw = unsafe { (device.library.reg_mr)(domain.raw.as_ptr(), ptr.cast(), len, access) };
        let raw = not_null(raw).map_err(|source| VerbsError::lacks(&device.name, "memory region", source))?;
        Ok(Region { domain: domain.clone(), raw })
    }

    pub fn local_key(&self) -> u32 {
        // SAFETY: the registration lives as long as `self`.
        unsafe { self.raw.as_ref() }.lkey
    }

    pub fn remote_key(&self) -> u32 {
        // SAFETY: the registration lives as long as `self`.
        unsafe { self.raw.as_ref() }.rkey
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: registered in `new`, deregistered once.
        unsafe { (self.domain.device.library.dereg_mr)(self.raw.as_ptr()) };
    }
}

/// A completion.
#[derive(Clone, Copy)]
pub struct Done {
    pub id: u64,
    pub status: i32,
    pub bytes: u32,
}

/// A reliable connected queue pair with its own completion queue, which has room for everything that can be in flight.
pub struct QueuePair {
    qp: NonNull<ibv_qp>,
    cq: NonNull<ibv_cq>,
    pub domain: Rc<Domain>,
    channel: Rc<CompletionChannel>,
    psn: u32,
    pub max_sends: u32,
    pub max_receives: u32,
}

impl QueuePair {
    /// In state INIT: receives may be posted. `key` identifies it in the channel's events.
    pub fn new(
        channel: &Rc<CompletionChannel>,
        config: &VerbsConfig,
        receives: u32,
        key: u64,
    ) -> Result<Self, VerbsError> {
        let device = &channel.device;
        let library = device.library;
        let domain = Domain::new(device)?;
        let most = device.limits.max_qp_wr.max(64).unsigned_abs();
        let max_sends = config.queue_depth.min(most);
        let max_receives = receives.min(most);
        let most = device.limits.max_cqe.max(1);
        let entries = i32::try_from(max_sends + max_receives + 1).map_or(most, |entries| entries.min(most));
        // SAFETY: context and channel are alive; the key is never dereferenced.
        let cq = unsafe { (library.create_cq)(device.raw(), entries, key as *mut _, channel.raw.as_ptr(), 0) };
        let cq = not_null(cq).map_err(|source| VerbsError::lacks(&device.name, "completion queue", source))?;
        let mut init = ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: cq.as_ptr(),
            recv_cq: cq.as_ptr(),
            srq: ptr::null_mut(),
            cap: ibv_qp_cap {
                max_send_wr: max_sends,
                max_recv_wr: max_receives,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: a live domain and completion queue.
        let qp = not_null(unsafe { (library.create_qp)(domain.raw.as_ptr(), &mut init) });
        let qp = match qp {
            Ok(qp) => qp,
            Err(source) => {
                // SAFETY: just created, and nothing uses it.
                unsafe { (library.destroy_cq)(cq.as_ptr()) };
                return Err(VerbsError::lacks(&device.name, "queue pair", source));
            }
        };
        let psn = random_psn();
        let pair = QueuePair { qp, cq, domain, channel: channel.clone(), psn, max_sends, max_receives };
        let mut attr = no_attributes();
        attr.qp_state = QPS_INIT;
        attr.pkey_index = config.pkey_index;
        attr.port_num = device.port;
        // The peer may read what it is offered; it may not write, and there are no atomics.
        attr.qp_access_flags = ACCESS_REMOTE_READ as u32;
        pair.modify(&mut attr, QP_STATE | QP_PKEY_INDEX | QP_PORT | QP_ACCESS_FLAGS, "be initialised")?;
        pair.arm()?;
        Ok(pair)
    }

    fn device(&self) -> &Rc<Device> {
        &self.channel.device
    }

    pub fn max_message(&self) -> u32 {
        self.device().max_message
    }

    /// The endpoint that the peer needs to reach this queue pair.
    pub fn endpoint(&self, slots: u16, slot_bytes: u32) -> Endpoint {
        let device = self.device();
        Endpoint {
            gid: device.gid,
            lid: device.lid,
            is_global: device.is_global,
            // SAFETY: the queue pair lives as long as `self`.
            number: unsafe { self.qp.as_ref() }.qp_num,
            psn: self.psn,
            mtu: device.mtu,
            reads: reads(device.limits.max_qp_rd_atom),
            slots,
            slot_bytes,
        }
    }

    /// From now on messages can arrive and be sent.
    pub fn connect(&self, peer: &Endpoint, config: &VerbsConfig) -> Result<(), VerbsError> {
        let device = self.device();
        let is_global = device.is_global || peer.is_global;
        let mut attr = no_attributes();
        attr.qp_state = QPS_RTR;
        attr.path_mtu = i32::from(device.mtu.min(peer.mtu));
        attr.dest_qp_num = peer.number;
        attr.rq_psn = peer.psn;
        attr.max_dest_rd_atomic = reads(device.limits.max_qp_rd_atom);
        attr.min_rnr_timer = RNR_TIMER;
        attr.ah_attr.dlid = peer.lid;
        attr.ah_attr.sl = config.service_level;
        attr.ah_attr.port_num = device.port;
        if is_global {
            attr.ah_attr.is_global = 1;
            attr.ah_attr.grh.dgid = GidField(peer.gid);
            attr.ah_attr.grh.sgid_index = device.gid_index;
            attr.ah_attr.grh.hop_limit = 64;
            attr.ah_attr.grh.traffic_class = config.traffic_class;
        }
        let mask = QP_STATE | QP_AV | QP_PATH_MTU | QP_DEST_QPN | QP_RQ_PSN | QP_MAX_DEST_RD_ATOMIC | QP_MIN_RNR_TIMER;
        self.modify(&mut attr, mask, "be connected")?;
        let mut attr = no_attributes();
        attr.qp_state = QPS_RTS;
        attr.timeout = config.timeout;
        attr.retry_cnt = config.retry_count;
        attr.rnr_retry = RNR_RETRIES;
        attr.sq_psn = self.psn;
        attr.max_rd_atomic = reads(device.limits.max_qp_init_rd_atom).min(peer.reads);
        let mask = QP_STATE | QP_TIMEOUT | QP_RETRY_CNT | QP_RNR_RETRY | QP_SQ_PSN | QP_MAX_QP_RD_ATOMIC;
        self.modify(&mut attr, mask, "start to send")
    }

    fn modify(&self, attr: &mut ibv_qp_attr, mask: i32, what: &'static str) -> Result<(), VerbsError> {
        let device = self.device();
        // SAFETY: a live queue pair and a structure in which all fields of the mask are set.
        check(unsafe { (device.library.modify_qp)(self.qp.as_ptr(), attr, mask) })
            .map_err(|source| VerbsError::Connect { device: device.name.clone(), what, source })
    }

    fn ops(&self) -> &ibv_context_ops {
        // SAFETY: the context is open as long as the device; its table is not modified after opening.
        unsafe { &(*self.device().raw()).ops }
    }

    /// # Safety
    /// `ptr..ptr+len` lies in the region with this key and is not modified until the message has completed or the queue
    /// pair is destroyed.
    pub unsafe fn send(&self, id: u64, ptr: *const u8, len: u32, key: u32, signaled: bool) -> Result<(), VerbsError> {
        // SAFETY: the caller upholds the contract of `post`.
        unsafe { self.post(id, WR_SEND, ptr as u64, len, key, (0, 0), signaled) }
    }

    /// Reads the peer's memory at `from` (address and key).
    ///
    /// # Safety
    /// As for `send`; in addition, the memory is writable and not accessed meanwhile.
    pub unsafe fn read(
        &self,
        id: u64,
        to: *mut u8,
        len: u32,
        key: u32,
        from: (u64, u32),
        signaled: bool,
    ) -> Result<(), VerbsError> {
        // SAFETY: the caller upholds the contract of `post`.
        unsafe { self.post(id, WR_RDMA_READ, to as u64, len, key, from, signaled) }
    }

    /// # Safety
    /// As for `send` or `read`, by opcode.
    #[expect(clippy::too_many_arguments, reason = "the fields of a work request")]
    unsafe fn post(
        &self,
        id: u64,
        opcode: i32,
        addr: u64,
        length: u32,
        lkey: u32,
        (remote_addr, rkey): (u64, u32),
        signaled: bool,
    ) -> Result<(), VerbsError> {
        let mut sge = ibv_sge { addr, length, lkey };
        let mut request = ibv_send_wr {
            wr_id: id,
            next: ptr::null_mut(),
            sg_list: &mut sge,
            num_sge: 1,
            opcode,
            send_flags: if signaled { SEND_SIGNALED } else { 0 },
            imm_data: 0,
            rdma: rdma_target { remote_addr, rkey, unused: [0; 2] },
            xrc: 0,
            unused: [0; 6],
        };
        let mut bad = ptr::null_mut();
        let Some(post) = self.ops().post_send else { return Err(self.incomplete()) };
        // SAFETY: a live queue pair; the call copies the request.
        check(unsafe { post(self.qp.as_ptr(), &mut request, &mut bad) })
            .map_err(|source| VerbsError::Post { what: "a work request", source })
    }

    /// # Safety
    /// As for `read`.
    pub unsafe fn receive(&self, id: u64, ptr: *mut u8, len: u32, key: u32) -> Result<(), VerbsError> {
        let mut sge = ibv_sge { addr: ptr as u64, length: len, lkey: key };
        let mut request = ibv_recv_wr { wr_id: id, next: ptr::null_mut(), sg_list: &mut sge, num_sge: 1 };
        let mut bad = ptr::null_mut();
        let Some(post) = self.ops().post_recv else { return Err(self.incomplete()) };
        // SAFETY: a live queue pair; the call copies the request.
        check(unsafe { post(self.qp.as_ptr(), &mut request, &mut bad) })
            .map_err(|source| VerbsError::Post { what: "a buffer", source })
    }

    /// Requests an event for the next completion.
    pub fn arm(&self) -> Result<(), VerbsError> {
        let Some(arm) = self.ops().req_notify_cq else { return Err(self.incomplete()) };
        // SAFETY: a live completion queue.
        check(unsafe { arm(self.cq.as_ptr(), 0) })
            .map_err(|source| VerbsError::Post { what: "a request for events", source })
    }

    /// Takes completions; false: there were none.
    pub fn poll(&self, out: &mut Vec<Done>) -> Result<bool, VerbsError> {
        let Some(poll) = self.ops().poll_cq else { return Err(self.incomplete()) };
        // SAFETY: all-zero is a valid value of this plain structure.
        let mut found: [ibv_wc; POLLED as usize] = unsafe { std::mem::zeroed() };
        // SAFETY: a live completion queue, and room for `POLLED` completions.
        let count = unsafe { poll(self.cq.as_ptr(), POLLED.into(), found.as_mut_ptr()) };
        let broken =
            |_| VerbsError::Event { device: self.device().name.clone(), what: "cannot read the completion queue" };
        let count = usize::try_from(count).map_err(broken)?;
        out.extend(found.iter().take(count).map(|wc| Done { id: wc.wr_id, status: wc.status, bytes: wc.byte_len }));
        Ok(count > 0)
    }

    /// Whether an asynchronous event concerns this queue pair or its completion queue.
    pub fn is_meant_by(&self, element: u64) -> bool {
        element == self.qp.as_ptr() as u64 || element == self.cq.as_ptr() as u64
    }

    fn incomplete(&self) -> VerbsError {
        VerbsError::Event { device: self.device().name.clone(), what: "its provider library is incomplete" }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let library = self.device().library;
        // SAFETY: created in `new`, destroyed once, the queue pair before the completion queue that it uses. Afterwards
        // the device accesses none of its buffers.
        unsafe {
            (library.destroy_qp)(self.qp.as_ptr());
            (library.destroy_cq)(self.cq.as_ptr());
        }
    }
}

/// READs in flight, by what the device allows.
fn reads(most: i32) -> u8 {
    u8::try_from(most.max(1)).map_or(MAX_READS, |reads| reads.min(MAX_READS))
}

fn no_attributes() -> ibv_qp_attr {
    // SAFETY: all-zero is a valid value of this plain structure.
    unsafe { std::mem::zeroed() }
}

/// 24 bits that an outsider cannot guess.
fn random_psn() -> u32 {
    let mut bytes = [0u8; 4];
    // SAFETY: `bytes` is writable. Requests of up to 256 bytes are never filled partially.
    unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    u32::from_le_bytes(bytes) & 0xff_ffff
}
