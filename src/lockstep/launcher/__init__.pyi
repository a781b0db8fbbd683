from .failures import Outcome as Outcome
from .job import Job as Job
from .job import check_num_ranks as check_num_ranks
from .job import job_of as job_of
from .job import whole_number as whole_number
from .start import launch as launch
from .start import run_job as run_job
from .start import supervise as supervise
