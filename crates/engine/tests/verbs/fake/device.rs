//! Devices, contexts, ports.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::abi::*;
use super::faults::Spec;
use super::queue;

#[repr(C)]
pub struct Device {
    raw: ibv_device,
    pub name: String,
    pub spec: Arc<Spec>,
}

#[repr(C)]
pub struct Context {
    pub raw: ibv_context,
    pub spec: Arc<Spec>,
    pub events: Arc<AsyncEvents>,
}

/// Asynchronous events: a pipe with one byte for each.
pub struct AsyncEvents {
    pub fds: [c_int; 2],
    pub queue: Mutex<Vec<(u64, c_int)>>,
}

impl AsyncEvents {
    pub fn raise(&self, element: u64, event: c_int) {
        self.queue.lock().unwrap().push((element, event));
        unsafe { libc::write(self.fds[1], [0u8].as_ptr().cast(), 1) };
    }
}

/// Devices live for ever.
static DEVICES: Mutex<Option<Vec<usize>>> = Mutex::new(None);

pub fn errno(code: c_int) {
    unsafe { *libc::__errno_location() = code };
}

pub unsafe fn context<'a>(raw: *mut ibv_context) -> &'a Context {
    unsafe { &*raw.cast::<Context>() }
}

pub unsafe fn count(raw: *mut ibv_context, change: i64) {
    unsafe { context(raw) }.spec.alive.fetch_add(change, Ordering::SeqCst);
}

fn add(devices: &mut Vec<usize>, name: &str, spec: &str) {
    let mut raw: ibv_device = unsafe { std::mem::zeroed() };
    for (to, from) in raw.name.iter_mut().zip(name.bytes()) {
        *to = from as c_char;
    }
    let device = Box::new(Device { raw, name: name.into(), spec: Arc::new(Spec::parse(spec)) });
    devices.push(Box::into_raw(device) as usize);
}

fn with_devices<R>(f: impl FnOnce(&mut Vec<usize>) -> R) -> R {
    let mut devices = DEVICES.lock().unwrap();
    let devices = devices.get_or_insert_with(|| {
        let mut made = Vec::new();
        let text = std::env::var("FAKE_VERBS").unwrap_or_else(|_| "fake0".to_owned());
        for device in text.split(';').filter(|device| !device.is_empty()) {
            let (name, spec) = device.split_once(':').unwrap_or((device, ""));
            add(&mut made, name, spec);
        }
        made
    });
    f(devices)
}

/// Makes one more device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_verbs_device(name: *const c_char, spec: *const c_char) {
    let (name, spec) = unsafe { (CStr::from_ptr(name), CStr::from_ptr(spec)) };
    with_devices(|devices| add(devices, &name.to_string_lossy(), &spec.to_string_lossy()));
}

/// How many objects of a device exist.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_verbs_alive(name: *const c_char) -> i64 {
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    with_devices(|devices| {
        let all = devices.iter().map(|at| unsafe { &*(*at as *const Device) });
        all.filter(|device| device.name == name).map(|device| device.spec.alive.load(Ordering::SeqCst)).sum()
    })
}

/// How many registrations of a device touch some memory with (at least) these rights.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_verbs_covers(name: *const c_char, addr: u64, len: u64, access: c_int) -> i64 {
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    with_devices(|devices| {
        let all = devices.iter().map(|at| unsafe { &*(*at as *const Device) });
        let covers = |spec: &Spec| {
            let registered = spec.registered.lock().unwrap();
            let touches = |(start, size, rights): &&(u64, u64, c_int)| {
                *start < addr + len && addr < *start + *size && rights & access == access
            };
            registered.values().filter(touches).count() as i64
        };
        all.filter(|device| device.name == name).map(|device| covers(&device.spec)).sum()
    })
}

static FORK_SAFE: AtomicBool = AtomicBool::new(false);

#[unsafe(no_mangle)]
pub extern "C" fn ibv_fork_init() -> c_int {
    FORK_SAFE.store(true, Ordering::SeqCst);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let list: Vec<*mut ibv_device> = with_devices(|d| d.iter().map(|at| *at as *mut ibv_device).collect());
    unsafe { *count = list.len() as c_int };
    let list = [list, vec![std::ptr::null_mut()]].concat();
    Box::into_raw(list.into_boxed_slice()).cast()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    // The list ends with a null.
    let len = 1 + (0..).take_while(|at| unsafe { !(*list.add(*at)).is_null() }).count();
    drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, len)) });
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    unsafe { (*device).name.as_ptr() }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    let spec = unsafe { (*device.cast::<Device>()).spec.clone() };
    if !FORK_SAFE.load(Ordering::SeqCst) {
        errno(libc::ENOTSUP);
        return std::ptr::null_mut();
    }
    if let Some(code) = spec.hit("open_device") {
        errno(code);
        return std::ptr::null_mut();
    }
    let mut fds = [0; 2];
    unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) };
    let mut raw: ibv_context = unsafe { std::mem::zeroed() };
    raw.device = device;
    raw.async_fd = fds[0];
    raw.ops.poll_cq = Some(queue::poll_cq);
    raw.ops.req_notify_cq = Some(queue::req_notify_cq);
    raw.ops.post_send = Some(queue::post_send);
    raw.ops.post_recv = Some(queue::post_recv);
    spec.alive.fetch_add(1, Ordering::SeqCst);
    let events = Arc::new(AsyncEvents { fds, queue: Mutex::default() });
    Box::into_raw(Box::new(Context { raw, spec, events })).cast()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_close_device(raw: *mut ibv_context) -> c_int {
    let context = unsafe { Box::from_raw(raw.cast::<Context>()) };
    for fd in context.events.fds {
        unsafe { libc::close(fd) };
    }
    context.spec.alive.fetch_sub(1, Ordering::SeqCst);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_device(raw: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    let (spec, attr) = unsafe { (&context(raw).spec, &mut *attr) };
    attr.max_qp = 1000;
    attr.max_qp_wr = spec.queue;
    attr.max_cqe = 4096;
    attr.max_qp_rd_atom = 8;
    attr.max_qp_init_rd_atom = 8;
    attr.phys_port_cnt = 1;
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_port(raw: *mut ibv_context, _port: u8, attr: *mut ibv_port_attr) -> c_int {
    let (spec, attr) = unsafe { (&context(raw).spec, &mut *attr) };
    if let Some(code) = spec.hit("query_port") {
        return code;
    }
    attr.state = if spec.down { 1 } else { PORT_ACTIVE };
    attr.max_mtu = 5;
    attr.active_mtu = spec.mtu;
    attr.gid_tbl_len = 4;
    // Small, so that pieces are cut.
    attr.max_msg_sz = 1 << 20;
    attr.link_layer = LINK_LAYER_ETHERNET;
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_ex(
    raw: *mut ibv_context,
    _port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    _flags: u32,
    _size: usize,
) -> c_int {
    let spec = unsafe { &context(raw).spec };
    let entry = unsafe { &mut *entry };
    match index {
        0 => {
            entry.gid = GidField([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
            entry.gid_type = 1;
            0
        }
        1 if !spec.no_gid => {
            entry.gid = GidField(spec.gid);
            entry.gid_type = GID_TYPE_ROCE_V2;
            0
        }
        _ => libc::ENODATA,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid(raw: *mut ibv_context, _port: u8, index: c_int, gid: *mut GidField) -> c_int {
    let spec = unsafe { &context(raw).spec };
    match index {
        1 if !spec.no_gid => {
            unsafe { *gid = GidField(spec.gid) };
            0
        }
        _ => -1,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_async_event(raw: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    let events = unsafe { &context(raw).events };
    let mut byte = 0u8;
    if unsafe { libc::read(events.fds[0], (&raw mut byte).cast::<c_void>(), 1) } != 1 {
        return -1;
    }
    let (element, event_type) = events.queue.lock().unwrap().remove(0);
    unsafe { *event = ibv_async_event { element, event_type } };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_ack_async_event(_event: *mut ibv_async_event) {}
