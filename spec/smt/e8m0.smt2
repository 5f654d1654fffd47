; formats.e8m0.cast, as SMT-LIB 2.6, logic QF_BV. Written by `make clauses`.

(define-fun e8m0.down ((x (_ BitVec 32))) (_ BitVec 8)
  ((_ extract 30 23) x))

(define-fun e8m0.nearest ((x (_ BitVec 32))) (_ BitVec 8)
  (let ((t0 ((_ extract 30 23) x)))
  (let ((t1 ((_ extract 22 0) x)))
  (let ((t2 (ite (= t0 (_ bv0 8)) (ite (bvult (_ bv4194304 23) t1) #b1 #b0) (ite (bvule (_ bv4194304 23) t1) #b1 #b0))))
  (ite (= t0 (_ bv255 8)) t0 (bvadd t0 (concat (_ bv0 7) t2)))))))
