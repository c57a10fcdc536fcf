-- The events of a session: its logs, who is attached, and what a connection's GET stream carries.
--
-- Where a script takes the moment, these are its first five ARGV: now, the epoch of a log that begins
-- anew, and the window: the most events, the most bytes, the greatest age.

-- script append: session log
-- ARGV: the moment (5), stream, since when it may be stored already (empty: it is not), before, and
-- each optional: after, key, origin, name
local ends = redis.call('HGET', base, 'ends')
local now, stream, since = tonumber(ARGV[1]), ARGV[6], tonumber(ARGV[7])
if not ends or has_come(ends, now) then
    return false
end
ends = seconds(ends)
local log = open_or_make_log(stream, ARGV[2], ends)
local window = window_of(log, ends)
local number, stored = nil, nil
if since then
    number, stored = stored_before(log, ARGV[16], since)
end
if number then
    local attached = redis.call('HMGET', base, 'conn', 'fence')
    return { log.epoch, whole(number), stored, attached[1], attached[2], 0 }
end
local payload, connection, fence, replaced = append(
    log, now, window, ARGV[8], optional(9), optional(11), optional(13), optional(15))
-- A response stream whose process died is dropped by nobody: what is too old to be replayed
-- leaves it with the first event of a newer one. :r has the response streams that hold events,
-- by the time of their oldest; a few of those that are due are looked at each time, so that an
-- event costs the same however many streams there are.
local AT_ONCE = 16
local by_age = base .. ':r'
local function list(name, at)
    redis.call('ZADD', by_age, at, name)
    share_lifetime(by_age)
end
if is_response(stream) and log.count == 1 then
    list(stream, exact(log.first_at))
end
if is_response(stream) and log.head == 1 then
    local due = redis.call('ZRANGEBYSCORE', by_age, '-inf', '(' .. exact(now - window.age),
        'LIMIT', 0, AT_ONCE)
    for _, name in ipairs(due) do
        local other = open_log(name, ARGV[2], ends)
        if other then
            evict(other, now, window)
            save(other)
        end
        if not other or other.count == 0 then
            redis.call('UNLINK', base .. ':e:' .. name, base .. ':k:' .. name)
            redis.call('ZREM', by_age, name)
        else
            list(name, exact(other.first_at))
        end
    end
end
return { log.epoch, whole(log.head), payload, connection, fence, replaced }

-- script append_change: session log
-- KEYS: sessions.
-- ARGV: the moment (5), what names the change, since when it may be stored
-- already (empty: it is not), the resource that was updated, the list that changed (one of them is
-- empty), what is before the session's id, between that and the event's, after both, the message
-- without either, its key (optional).
-- Of each session: its stream, epoch, number and payload of the event, who is attached, the fencing
-- epoch, whether an older event was replaced; or why it has none.
local now, since, key = tonumber(ARGV[1]), tonumber(ARGV[7]), optional(14)
local change, uri, list = ARGV[6], ARGV[8], ARGV[9]

-- As core/entitlement.py (EVT1).
local function entitled(mode, lists)
    if not is_named(mode) then
        return false
    end
    if list == '' then
        return redis.call('HEXISTS', base .. ':u', uri) == 1
    end
    if mode == 'transport' then
        return redis.call('EXISTS', base .. ':c') == 0
    end
    return not lists or string.find(lists, '"' .. list .. '"', 1, true)
end

local function append_to_session()
    local fields = redis.call('HMGET', base, 'id', 'mode', 'ends', 'lists', 'conn', 'fence')
    local id, mode, ends = fields[1], fields[2], fields[3]
    if not id or has_come(ends, now) then
        return 'gone'
    end
    if not entitled(mode, fields[4]) then
        return 'not entitled'
    end
    ends = seconds(ends)
    local is_protocol = mode == 'protocol'
    local stream = is_protocol and 'events' or 'get'
    local log = open_or_make_log(stream, ARGV[2], ends)
    local number, payload, replaced = nil, nil, 0
    if since then
        number, payload = stored_before(log, change, since)
    end
    if not number then
        local _
        local before, after = ARGV[13], nil
        if is_protocol then
            before, after = ARGV[10] .. id .. ARGV[11], ARGV[12]
        end
        payload, _, _, replaced = append(
            log, now, window_of(log, ends), before, after, key, nil, change)
        number = log.head
    end
    return { stream, log.epoch, whole(number), payload, fields[5], fields[6], replaced }
end

local function begin_anew()
    -- The log lacks this change now: positions in it are refused from here on (CUP8).
    for _, log in ipairs({ 'l:events', 'l:get' }) do
        if redis.pcall('HEXISTS', base, log) == 1 then
            redis.call('HSET', base, log, '?')
        end
    end
end

-- If another program damaged one session, the others get the change.
return of_each(append_to_session, begin_anew)

-- script ids: session
-- KEYS: sessions. Their ids; false: it is not there.
return of_each(function()
    local id = redis.pcall('HGET', base, 'id')
    return type(id) == 'string' and id
end)

-- script heads: session log
-- KEYS: sessions. ARGV: stream, new log epoch, whether to make it if it is not there (1)
-- Of each session: whether it carries others; epoch and number of the stream's head, if there is
-- such a stream. False: it is not there. 'broken': another program left what is none of ours.
local open = ARGV[3] == '1' and open_or_make_log or open_log
return of_each(function()
    local ends = redis.call('HGET', base, 'ends')
    if not ends then
        return false
    end
    local log = open(ARGV[1], ARGV[2], seconds(ends))
    local carries = redis.call('EXISTS', base .. ':c')
    return log and { carries, log.epoch, whole(log.head) } or { carries }
end)

-- script read: session log
-- ARGV: the moment (5), stream, why the position is none, its epoch, its number, limit of a page or
-- nothing, its bytes
local ends = redis.call('HGET', base, 'ends')
local log = ends and open_log(ARGV[6], ARGV[2], seconds(ends))
if not log then
    return { 'unknown_position' }
end
local entries, reason = since(log, seconds(ends), 7, ARGV[10], ARGV[11])
return { reason or false, log.epoch, entries or {} }

-- script drop_stream: session log
-- ARGV: stream
if ARGV[1] ~= 'events' then
    drop_stream(ARGV[1])
end
return false

-- script drop_origin: session log
-- ARGV: stream, origin, new log epoch, fencing epoch (empty: whatever)
local ends = redis.call('HGET', base, 'ends')
if not ends then
    return false
end
local fence = carried(ARGV[2])
if fence and ARGV[4] ~= '' and fence > tonumber(ARGV[4]) then
    return false
end
drop_origin(ARGV[1], ARGV[2], ARGV[3], seconds(ends))
if ARGV[1] == 'get' then
    redis.call('HDEL', base .. ':c', ARGV[2])
end
return false

-- script carry: session log
-- ARGV: origin, fencing epoch, log epoch and number of the last event that is there, new log epoch
local ends, own = redis.call('HGET', base, 'ends'), tonumber(ARGV[2])
if not ends then
    return 0
end
local fence = carried(ARGV[1])
if fence and fence >= own then
    return fence == own and 1 or 0
end
drop_origin('get', ARGV[1], ARGV[5], seconds(ends))
redis.call('HSET', base .. ':c', ARGV[1], table.concat({ ARGV[2], ARGV[3], ARGV[4] }, ' '))
share_lifetime(base .. ':c')
return 1

-- script relay: session log
-- ARGV: the moment (5), origin, fencing epoch, log epoch and number of the event, skips, payload, key
-- (optional)
-- As core/attachment.py: once, and in the order of the session's own log (ATT6).
local ends, now = redis.call('HGET', base, 'ends'), tonumber(ARGV[1])
if not ends or has_come(ends, now) then
    return false
end
ends = seconds(ends)
local origin, epoch, number = ARGV[6], ARGV[8], tonumber(ARGV[9])
local fence, last_epoch, last = carried(origin)
if fence ~= tonumber(ARGV[7]) or epoch < last_epoch then
    return false
end
if epoch > last_epoch then
    -- Its log was made anew: none of the new one's events is here.
    last_epoch, last = epoch, 0
end
if number <= last then
    return false
end
if number > last + 1 and ARGV[10] ~= '1' then
    return { 'missing', last_epoch, whole(last) }
end
redis.call('HSET', base .. ':c', origin, table.concat({ ARGV[7], epoch, whole(number) }, ' '))
local log = open_or_make_log('get', ARGV[2], ends)
append(
    log, now, window_of(log, ends), ARGV[11], nil, optional(12), origin)
return { 'relayed', log.epoch, whole(log.head) }

-- script attach: session log story
-- ARGV: the moment (5), why the position is none, its epoch, its number; connection (optional), only
-- if free; of the entry of its story, the time and the text
--
-- As core/attachment.py: the newest attachment is the only one (RES3, TKO1).
local fields = redis.call('HMGET', base, 'ends', 'conn', 'fence', 'maker', 'waits')
if not fields[1] or has_come(fields[1], ARGV[1]) or (ARGV[11] == '1' and fields[2]) then
    return false
end
local ends = seconds(fields[1])
local log = open_or_make_log('events', ARGV[2], ends)
-- Whoever has an epoch that the data set knows nothing of must not find it valid again.
local lost = tonumber(redis.call('HGET', base, 'lost') or 0)
redis.call('HDEL', base, 'lost')
local fence = tonumber(fields[3]) + 1 + 1000 * lost
local entries, reason = since(log, ends, 6, '')
redis.call('HSET', base, 'fence', whole(fence))
local connection = optional(9)
if connection then
    redis.call('HSET', base, 'conn', connection)
    redis.call('HDEL', base, 'waits')
else
    fields[5] = false
    redis.call('HDEL', base, 'conn')
end
if ARGV[12] then
    local taken = fields[2] and fields[2] ~= connection and 'over' or 'free'
    tell(ARGV[12], table.concat({
        ARGV[13], taken, ARGV[6] == '' and ARGV[8] or '-', whole(log.head), #(entries or {}),
        whole(log.evicted), reason or '-',
    }, ' '))
end
return {
    whole(fence), log.epoch, whole(log.head), fields[2], fields[3], reason or false,
    entries or {}, fields[4], fields[5],
}

-- script detach: session story
-- ARGV: fencing epoch; of the entry of its story, the time and the text
-- The late end of a displaced connection changes nothing (TKO9).
local fields = redis.call('HMGET', base, 'conn', 'fence')
if not fields[1] or fields[2] ~= ARGV[1] then
    return 0
end
redis.call('HDEL', base, 'conn')
if ARGV[2] then
    tell(ARGV[2], ARGV[3])
end
return 1
