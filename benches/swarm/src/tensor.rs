//! A recorded tensor in the two forms in which it can be asked for.

use bytes::Bytes;

use crate::wire::{Value, put};

pub struct Tensor {
    /// For starwire: see "Tensors" in docs/protocol.md.
    pub meta: Vec<u8>,
    pub content: Bytes,
    /// A serialised `RecvTensorResponse`.
    pub response: Bytes,
}

const VERSION: u8 = 1;
const ENCODING_NONE: u8 = 0;
const ENCODING_RAW: u8 = 1;

impl Tensor {
    /// `content`: the elements as they lie in memory. None: too many dimensions.
    pub fn new(dtype: u16, dims: &[u64], content: Bytes) -> Option<Self> {
        let mut meta = vec![VERSION, 0];
        meta.extend_from_slice(&dtype.to_le_bytes());
        meta.push(if content.is_empty() { ENCODING_NONE } else { ENCODING_RAW });
        meta.push(u8::try_from(dims.len()).ok().filter(|n| *n <= 254)?);
        meta.extend_from_slice(&[0; 10]);
        meta.extend_from_slice(&(content.len() as u64).to_le_bytes());
        dims.iter().for_each(|size| meta.extend_from_slice(&size.to_le_bytes()));
        let response = response(dtype, dims, &content).into();
        Some(Self { meta, content, response })
    }
}

fn response(dtype: u16, dims: &[u64], content: &[u8]) -> Vec<u8> {
    let mut shape = Vec::new();
    for size in dims {
        let mut dim = Vec::new();
        put(&mut dim, 1, Value::Varint(*size));
        put(&mut shape, 2, Value::Bytes(&dim));
    }
    let mut tensor = Vec::with_capacity(content.len() + shape.len() + 32);
    put(&mut tensor, 1, Value::Varint(u64::from(dtype)));
    put(&mut tensor, 2, Value::Bytes(&shape));
    put(&mut tensor, 4, Value::Bytes(content));
    let mut response = Vec::with_capacity(tensor.len() + 16);
    put(&mut response, 1, Value::Bytes(&tensor));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_say_the_same() {
        let tensor = Tensor::new(1, &[2, 1], Bytes::from_static(b"12345678")).unwrap();
        let mut meta = vec![1, 0, 1, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        for n in [8u64, 2, 1] {
            meta.extend_from_slice(&n.to_le_bytes());
        }
        assert_eq!(tensor.meta, meta);
        // tensor { dtype: DT_FLOAT tensor_shape { dim { size: 2 } dim { size: 1 } } tensor_content: … }
        assert_eq!(
            tensor.response[..],
            b"\x0a\x16\x08\x01\x12\x08\x12\x02\x08\x02\x12\x02\x08\x01\x22\x0812345678"[..]
        );
        assert_eq!(Tensor::new(1, &[0], Bytes::new()).unwrap().meta[4], ENCODING_NONE);
        assert!(Tensor::new(1, &[1; 255], Bytes::new()).is_none());
    }
}
