//! Protection domains, memory regions, completion channels and queues.

use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::abi::*;
use super::device::{AsyncEvents, context, count, errno};

/// Memory that a device may touch.
#[derive(Clone, Copy)]
pub struct Region {
    pub addr: u64,
    pub len: u64,
    pub access: c_int,
}

/// Memory regions of a protection domain by key. Copies run under this lock, so that none happens after `dereg_mr`.
pub type Regions = Arc<Mutex<HashMap<u32, Region>>>;

#[repr(C)]
pub struct Pd {
    raw: ibv_pd,
    pub regions: Regions,
}

#[repr(C)]
pub struct Channel {
    raw: ibv_comp_channel,
    shared: Arc<ChannelShared>,
}

struct ChannelShared {
    fd: c_int,
    /// Handles of completion queues.
    events: Mutex<VecDeque<u64>>,
}

#[repr(C)]
pub struct Cq {
    raw: ibv_cq,
    pub shared: Arc<CqShared>,
}

pub struct CqShared {
    handle: AtomicU64,
    channel: Option<Arc<ChannelShared>>,
    capacity: usize,
    state: Mutex<CqState>,
    gotten: AtomicU64,
    acknowledged: AtomicU64,
    events: Arc<AsyncEvents>,
}

#[derive(Default)]
struct CqState {
    queue: VecDeque<ibv_wc>,
    armed: bool,
    broken: bool,
}

impl CqShared {
    pub fn push(&self, wc: ibv_wc) {
        let mut state = self.state.lock().unwrap();
        if state.queue.len() >= self.capacity && !state.broken {
            state.broken = true;
            drop(state);
            return self.break_down();
        }
        if state.broken {
            return;
        }
        state.queue.push_back(wc);
        if std::mem::take(&mut state.armed) {
            if let Some(channel) = &self.channel {
                channel.events.lock().unwrap().push_back(self.handle.load(Ordering::SeqCst));
                unsafe { libc::eventfd_write(channel.fd, 1) };
            }
        }
    }

    pub fn break_down(&self) {
        self.state.lock().unwrap().broken = true;
        self.events.raise(self.handle.load(Ordering::SeqCst), EVENT_CQ_ERR);
    }

    pub fn fatal(&self) {
        self.events.raise(0, EVENT_DEVICE_FATAL);
    }

    pub fn arm(&self) {
        self.state.lock().unwrap().armed = true;
    }

    pub fn pop(&self) -> Option<ibv_wc> {
        self.state.lock().unwrap().queue.pop_front()
    }

    /// Drops all completions of a destroyed queue pair.
    pub fn forget(&self, qp_num: u32) {
        self.state.lock().unwrap().queue.retain(|wc| wc.qp_num != qp_num);
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_alloc_pd(raw: *mut ibv_context) -> *mut ibv_pd {
    if let Some(code) = unsafe { context(raw) }.spec.hit("alloc_pd") {
        errno(code);
        return std::ptr::null_mut();
    }
    unsafe { count(raw, 1) };
    Box::into_raw(Box::new(Pd { raw: ibv_pd { context: raw, handle: 0 }, regions: Regions::default() })).cast()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    let pd = pd.cast::<Pd>();
    if unsafe { !(*pd).regions.lock().unwrap().is_empty() || Arc::strong_count(&(*pd).regions) > 1 } {
        return libc::EBUSY;
    }
    unsafe { count((*pd).raw.context, -1) };
    drop(unsafe { Box::from_raw(pd) });
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr {
    static NEXT: AtomicU32 = AtomicU32::new(0x1000);
    let owner = unsafe { &*pd.cast::<Pd>() };
    if let Some(code) = unsafe { context((*pd).context) }.spec.hit("reg_mr") {
        errno(code);
        return std::ptr::null_mut();
    }
    if access & !(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_READ) != 0 {
        errno(libc::EINVAL);
        return std::ptr::null_mut();
    }
    if !unsafe { context((*pd).context) }.spec.may_pin(length as u64) {
        errno(libc::ENOMEM);
        return std::ptr::null_mut();
    }
    let key = NEXT.fetch_add(7, Ordering::Relaxed);
    let region = Region { addr: addr as u64, len: length as u64, access };
    owner.regions.lock().unwrap().insert(key, region);
    let owner = unsafe { (*pd).context };
    unsafe { context(owner) }.spec.registered.lock().unwrap().insert(key, (addr as u64, length as u64, access));
    let context = owner;
    unsafe { count(context, 1) };
    Box::into_raw(Box::new(ibv_mr { context, pd, addr, length, handle: key, lkey: key, rkey: key }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    let mr = unsafe { Box::from_raw(mr) };
    unsafe { &*mr.pd.cast::<Pd>() }.regions.lock().unwrap().remove(&mr.handle);
    unsafe { context(mr.context) }.spec.registered.lock().unwrap().remove(&mr.handle);
    unsafe { count(mr.context, -1) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_comp_channel(raw: *mut ibv_context) -> *mut ibv_comp_channel {
    if let Some(code) = unsafe { context(raw) }.spec.hit("create_comp_channel") {
        errno(code);
        return std::ptr::null_mut();
    }
    unsafe { count(raw, 1) };
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE) };
    let shared = Arc::new(ChannelShared { fd, events: Mutex::default() });
    Box::into_raw(Box::new(Channel { raw: ibv_comp_channel { context: raw, fd, refcnt: 0 }, shared })).cast()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    let channel = channel.cast::<Channel>();
    if unsafe { (*channel).raw.refcnt } != 0 {
        return libc::EBUSY;
    }
    let channel = unsafe { Box::from_raw(channel) };
    unsafe {
        libc::close(channel.raw.fd);
        count(channel.raw.context, -1);
    }
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_cq(
    raw: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    _vector: c_int,
) -> *mut ibv_cq {
    let owner = unsafe { context(raw) };
    if let Some(code) = owner.spec.hit("create_cq") {
        errno(code);
        return std::ptr::null_mut();
    }
    let notify = (!channel.is_null()).then(|| unsafe {
        (*channel).refcnt += 1;
        (*channel.cast::<Channel>()).shared.clone()
    });
    let shared = Arc::new(CqShared {
        handle: AtomicU64::new(0),
        channel: notify,
        capacity: cqe as usize,
        state: Mutex::default(),
        gotten: AtomicU64::new(0),
        acknowledged: AtomicU64::new(0),
        events: owner.events.clone(),
    });
    let mut cq: ibv_cq = unsafe { std::mem::zeroed() };
    (cq.context, cq.channel, cq.cq_context, cq.cqe) = (raw, channel, cq_context, cqe);
    let cq = Box::into_raw(Box::new(Cq { raw: cq, shared: shared.clone() }));
    shared.handle.store(cq as u64, Ordering::SeqCst);
    unsafe { count(raw, 1) };
    cq.cast()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    let cq = cq.cast::<Cq>();
    let shared = unsafe { (*cq).shared.clone() };
    // The real library would wait without end.
    let until = Instant::now() + Duration::from_secs(5);
    while shared.gotten.load(Ordering::SeqCst) != shared.acknowledged.load(Ordering::SeqCst) {
        if Instant::now() > until {
            eprintln!("fake libibverbs: a completion queue is destroyed whose events were not acknowledged");
            std::process::abort();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    if let Some(channel) = &shared.channel {
        let mut events = channel.events.lock().unwrap();
        let before = events.len();
        events.retain(|handle| *handle != cq as u64);
        for _ in events.len()..before {
            let mut count = 0;
            unsafe { libc::eventfd_read(channel.fd, &mut count) };
        }
        unsafe { (*(*cq).raw.channel).refcnt -= 1 };
    }
    unsafe { count((*cq).raw.context, -1) };
    drop(unsafe { Box::from_raw(cq) });
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    let shared = unsafe { &(*channel.cast::<Channel>()).shared };
    let mut count = 0;
    if unsafe { libc::eventfd_read(shared.fd, &mut count) } != 0 {
        return -1;
    }
    let Some(handle) = shared.events.lock().unwrap().pop_front() else {
        errno(libc::EAGAIN);
        return -1;
    };
    let found = unsafe { &*(handle as *const Cq) };
    found.shared.gotten.fetch_add(1, Ordering::SeqCst);
    unsafe {
        *cq = handle as *mut ibv_cq;
        *cq_context = found.raw.cq_context;
    }
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, count: c_uint) {
    unsafe { &(*cq.cast::<Cq>()).shared }.acknowledged.fetch_add(u64::from(count), Ordering::SeqCst);
}
