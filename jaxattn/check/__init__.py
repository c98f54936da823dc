"""Is an attention right? Laws for anyone's, a trace that marks the first divergence, an adjoint toolkit."""

from jaxattn.check import adjoint as adjoint
from jaxattn.check.adapters import SUBJECTS as SUBJECTS
from jaxattn.check.faults import FAULTS as FAULTS
from jaxattn.check.faults import Fault as Fault
from jaxattn.check.invariants import Invariant as Invariant
from jaxattn.check.laws import LAWS as LAWS
from jaxattn.check.report import Report as Report
from jaxattn.check.report import Ruled as Ruled
from jaxattn.check.report import assert_laws as assert_laws
from jaxattn.check.report import run as run
from jaxattn.check.stages import Stages as Stages
from jaxattn.check.subject import Call as Call
from jaxattn.check.subject import Subject as Subject
from jaxattn.check.subject import of_attention as of_attention
from jaxattn.check.subject import of_function as of_function
from jaxattn.check.trace import trace as trace
from jaxattn.check.trace import trace_of as trace_of
from jaxattn.check.traced import Trace as Trace
from jaxattn.check.traced import TracedStage as TracedStage
from jaxattn.check.verdict import Verdict as Verdict
