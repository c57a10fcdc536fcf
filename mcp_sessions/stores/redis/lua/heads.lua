-- needs: session log
-- KEYS: sessions.
-- ARGV: stream, new log epoch.
-- Of each session: whether it carries others; epoch and number of the stream's head, if there is
-- such a stream. False: it is not there. 'broken': another program left what is none of ours.
local function head()
    local ends = redis.call('HGET', base, 'ends')
    if not ends then
        return false
    end
    local log = open_log(ARGV[1], ARGV[2], seconds(ends))
    local carries = redis.call('EXISTS', base .. ':c')
    return log and { carries, log.epoch, whole(log.head) } or { carries }
end

local heads = {}
for at, name in ipairs(KEYS) do
    base = name
    local is_read, answer = pcall(head)
    heads[at] = is_read and answer
    if not is_read then
        heads[at] = 'broken'
    end
end
return heads
