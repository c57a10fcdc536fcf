-- needs: session log
-- KEYS: sessions.
-- ARGV: now, new log epoch, window (3), what names the change, since when it may be stored
-- already (empty: it is not), the resource that was updated, the list that changed (one of them is
-- empty), what is before the session's id, between that and the event's, after both, the message
-- without either, its key, whether it has one.
-- Of each session: its id, its stream, epoch and number of the event, who is attached, the fencing
-- epoch, whether an older event was replaced; or why it has none.
local now, since, key = tonumber(ARGV[1]), tonumber(ARGV[7]), ARGV[15] == '1' and ARGV[14] or nil
local change, uri, list = ARGV[6], ARGV[8], ARGV[9]

-- As core/entitlement.py (EVT1).
local function entitled(mode, lists)
    if mode ~= 'protocol' and mode ~= 'transport' then
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
    local number, replaced = since and stored_before(log, change, since), 0
    if not number then
        local before, after = ARGV[13], nil
        if is_protocol then
            before, after = ARGV[10] .. id .. ARGV[11], ARGV[12]
        end
        local window = window_of(log, ends, ARGV[3], ARGV[4], ARGV[5])
        local payload, _, _, was_there = append(
            log, now, window, before, after, key, nil, change)
        if not payload then
            return 'full'
        end
        number, replaced = log.head, was_there
    end
    return { id, stream, log.epoch, whole(number), fields[5], fields[6], replaced }
end

local answers = {}
for at, name in ipairs(KEYS) do
    -- All that the other parts of this script do is on the session that it names.
    base = name
    -- If another program damaged one session, the others get the change.
    local succeeded, answer = pcall(append_to_session)
    if not succeeded then
        -- Its log lacks this change now: positions in it are refused from here on (CUP8).
        for _, log in ipairs({ 'l:events', 'l:get' }) do
            if redis.pcall('HEXISTS', base, log) == 1 then
                redis.call('HSET', base, log, '?')
            end
        end
    end
    answers[at] = succeeded and answer or 'broken'
end
return answers
