//! Queue pairs: one thread each (`machine.rs`).

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use super::abi::*;
use super::device::{context, count, errno};
use super::faults::Spec;
use super::machine::Machine;
use super::objects::{Cq, CqShared, Pd, Regions};
use super::wire;

#[repr(C)]
struct Qp {
    raw: ibv_qp,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

pub struct Shared {
    pub number: u32,
    pub spec: Arc<Spec>,
    pub regions: Regions,
    pub send_cq: Arc<CqShared>,
    pub recv_cq: Arc<CqShared>,
    pub wake: c_int,
    pub stop: AtomicBool,
    pub state: Mutex<State>,
    pub limits: ibv_qp_cap,
}

pub struct State {
    pub qp_state: c_int,
    pub peer_gid: [u8; 16],
    pub peer: u32,
    pub send_psn: u32,
    pub receive_psn: u32,
    pub timeout: Duration,
    pub retries: u32,
    pub rnr_retries: u32,
    pub sends: VecDeque<Work>,
    pub receives: VecDeque<Work>,
}

#[derive(Clone)]
pub struct Work {
    pub id: u64,
    pub opcode: c_int,
    pub signaled: bool,
    pub sges: Vec<ibv_sge>,
    pub remote: u64,
    pub rkey: u32,
}

impl Work {
    pub fn len(&self) -> u64 {
        self.sges.iter().map(|sge| u64::from(sge.length)).sum()
    }
}

pub fn completion(qp_num: u32, id: u64, opcode: c_int, status: c_int, byte_len: u64) -> ibv_wc {
    let mut wc: ibv_wc = unsafe { std::mem::zeroed() };
    (wc.wr_id, wc.opcode, wc.status, wc.byte_len, wc.qp_num) = (id, opcode, status, byte_len as u32, qp_num);
    wc
}

impl Shared {
    pub fn wake(&self) {
        unsafe { libc::eventfd_write(self.wake, 1) };
    }

    pub fn fail(&self, state: &mut State) {
        state.qp_state = QPS_ERR;
        for work in state.sends.drain(..) {
            self.send_cq.push(completion(self.number, work.id, WC_OPCODE_SEND, WC_WR_FLUSH_ERR, 0));
        }
        for work in state.receives.drain(..) {
            self.recv_cq.push(completion(self.number, work.id, WC_OPCODE_RECV, WC_WR_FLUSH_ERR, 0));
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    let owner = unsafe { context((*pd).context) };
    if let Some(code) = owner.spec.hit("create_qp") {
        errno(code);
        return std::ptr::null_mut();
    }
    let init = unsafe { &mut *init };
    let most = owner.spec.queue.unsigned_abs();
    if init.cap.max_send_wr > most || init.cap.max_recv_wr > most || init.cap.max_send_sge > 4 {
        errno(libc::EINVAL);
        return std::ptr::null_mut();
    }
    let (socket, number) = wire::bind(&owner.spec.gid);
    let cq = |raw: *mut ibv_cq| unsafe { (*raw.cast::<Cq>()).shared.clone() };
    let shared = Arc::new(Shared {
        number,
        spec: owner.spec.clone(),
        regions: unsafe { (*pd.cast::<Pd>()).regions.clone() },
        send_cq: cq(init.send_cq),
        recv_cq: cq(init.recv_cq),
        wake: unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) },
        stop: AtomicBool::new(false),
        limits: init.cap,
        state: Mutex::new(State {
            qp_state: 0,
            peer_gid: [0; 16],
            peer: 0,
            send_psn: 0,
            receive_psn: 0,
            timeout: Duration::ZERO,
            retries: 0,
            rnr_retries: 0,
            sends: VecDeque::new(),
            receives: VecDeque::new(),
        }),
    });
    let machine = Machine::new(shared.clone(), socket);
    let thread = std::thread::Builder::new().name("fake-verbs".into()).spawn(move || machine.run()).ok();
    let mut raw: ibv_qp = unsafe { std::mem::zeroed() };
    (raw.context, raw.pd, raw.qp_num) = (unsafe { (*pd).context }, pd, number);
    unsafe { count((*pd).context, 1) };
    Box::into_raw(Box::new(Qp { raw, shared, thread })).cast()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    let (shared, attr) = unsafe { (&(*qp.cast::<Qp>()).shared, &*attr) };
    let mut state = shared.state.lock().unwrap();
    let step = match (state.qp_state, attr.qp_state) {
        (_, QPS_ERR) => "error",
        (0, QPS_INIT) => "init",
        (QPS_INIT, QPS_RTR) => "rtr",
        (QPS_RTR, QPS_RTS) => "rts",
        _ => return libc::EINVAL,
    };
    if let Some(code) = shared.spec.hit(step) {
        return code;
    }
    let needed = match step {
        "init" => QP_STATE | QP_ACCESS_FLAGS | QP_PKEY_INDEX | QP_PORT,
        "rtr" => QP_STATE | QP_AV | QP_PATH_MTU | QP_DEST_QPN | QP_RQ_PSN | QP_MAX_DEST_RD_ATOMIC | QP_MIN_RNR_TIMER,
        "rts" => QP_STATE | QP_TIMEOUT | QP_RETRY_CNT | QP_RNR_RETRY | QP_SQ_PSN | QP_MAX_QP_RD_ATOMIC,
        _ => QP_STATE,
    };
    if mask != needed {
        return libc::EINVAL;
    }
    let spec = &shared.spec;
    let fits = match step {
        "init" => spec.is_wanted("want-pkey", attr.pkey_index),
        "rtr" => {
            spec.is_wanted("want-sl", attr.ah_attr.sl)
                && spec.is_wanted("want-class", attr.ah_attr.grh.traffic_class)
                && spec.is_wanted("want-mtu", attr.path_mtu)
        }
        "rts" => spec.is_wanted("want-timeout", attr.timeout) && spec.is_wanted("want-retries", attr.retry_cnt),
        _ => true,
    };
    match step {
        _ if !fits => return libc::EINVAL,
        "init" if attr.qp_access_flags & !(ACCESS_REMOTE_READ as u32) != 0 => return libc::EINVAL,
        "rtr" => {
            if attr.ah_attr.is_global == 0 {
                return libc::EINVAL;
            }
            state.peer_gid = attr.ah_attr.grh.dgid.0;
            state.peer = attr.dest_qp_num;
            state.receive_psn = attr.rq_psn;
        }
        "rts" => {
            state.send_psn = attr.sq_psn;
            state.timeout = Duration::from_nanos(4096 << attr.timeout);
            state.retries = u32::from(attr.retry_cnt);
            state.rnr_retries = u32::from(attr.rnr_retry);
        }
        "error" => shared.fail(&mut state),
        _ => {}
    }
    state.qp_state = attr.qp_state;
    drop(state);
    shared.wake();
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    let mut qp = unsafe { Box::from_raw(qp.cast::<Qp>()) };
    qp.shared.stop.store(true, Ordering::SeqCst);
    qp.shared.wake();
    if let Some(thread) = qp.thread.take() {
        let _ = thread.join();
    }
    qp.shared.send_cq.forget(qp.shared.number);
    qp.shared.recv_cq.forget(qp.shared.number);
    unsafe {
        libc::close(qp.shared.wake);
        count(qp.raw.context, -1);
    }
    0
}

unsafe fn sges(list: *const ibv_sge, count: c_int) -> Vec<ibv_sge> {
    if count == 0 { Vec::new() } else { unsafe { std::slice::from_raw_parts(list, count as usize) }.to_vec() }
}

pub unsafe extern "C" fn post_send(qp: *mut ibv_qp, first: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
    let shared = unsafe { &(*qp.cast::<Qp>()).shared };
    let mut next = first;
    let mut result = 0;
    while !next.is_null() {
        let request = unsafe { &*next };
        let mut state = shared.state.lock().unwrap();
        let full = state.sends.len() >= shared.limits.max_send_wr as usize;
        result = match shared.spec.hit("post_send") {
            Some(code) => code,
            None if full => libc::ENOMEM,
            None if !matches!(state.qp_state, QPS_RTS | QPS_ERR) => libc::EINVAL,
            None => 0,
        };
        if result != 0 {
            unsafe { *bad = next };
            break;
        }
        state.sends.push_back(Work {
            id: request.wr_id,
            opcode: request.opcode,
            signaled: request.send_flags & SEND_SIGNALED != 0,
            sges: unsafe { sges(request.sg_list, request.num_sge) },
            remote: request.rdma.remote_addr,
            rkey: request.rdma.rkey,
        });
        next = request.next;
    }
    shared.wake();
    result
}

pub unsafe extern "C" fn post_recv(qp: *mut ibv_qp, first: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    let shared = unsafe { &(*qp.cast::<Qp>()).shared };
    let mut next = first;
    while !next.is_null() {
        let request = unsafe { &*next };
        let mut state = shared.state.lock().unwrap();
        let full = state.receives.len() >= shared.limits.max_recv_wr as usize;
        let result = match shared.spec.hit("post_recv") {
            Some(code) => code,
            None if full => libc::ENOMEM,
            None if state.qp_state == 0 => libc::EINVAL,
            None => 0,
        };
        if result != 0 {
            unsafe { *bad = next };
            return result;
        }
        state.receives.push_back(Work {
            id: request.wr_id,
            opcode: 0,
            signaled: true,
            sges: unsafe { sges(request.sg_list, request.num_sge) },
            remote: 0,
            rkey: 0,
        });
        next = request.next;
    }
    // A failed queue pair completes it at once, with an error.
    shared.wake();
    0
}

pub unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, count: c_int, out: *mut ibv_wc) -> c_int {
    let shared = unsafe { &(*cq.cast::<Cq>()).shared };
    for index in 0..count {
        let Some(wc) = shared.pop() else { return index };
        unsafe { *out.add(index as usize) = wc };
    }
    count
}

pub unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, _solicited_only: c_int) -> c_int {
    unsafe { &(*cq.cast::<Cq>()).shared }.arm();
    0
}
